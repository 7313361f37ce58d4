# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill layout` shows stock's layout and split ones of any hybrid model, from its config.json."""

import json

import pytest
from typer.testing import CliRunner

from vllm_kda_prefill.cli import app
from vllm_kda_prefill.layout_command import read_memory
from vllm_kda_prefill.planning import GLM_SHAPES

QWEN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
}


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return write(tmp_path_factory.mktemp("glm"), GLM_SHAPES)


def run(*arguments):
    # Verbose, for the other way switches logging off.
    return CliRunner().invoke(app, ["layout", *arguments, "--verbose"])


def report(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout[result.stdout.index("{") :])


@pytest.fixture(scope="module")
def glm_report(glm):
    engine = "--tp 4 --dcp 4 --mtp 3 --kv-cache-dtype fp8 --memory 24GiB --max-model-len 131072".split()
    return report("--model", glm, *engine)


def test_stock_and_split_stand_side_by_side(glm_report):
    layouts = glm_report["layouts"]
    assert list(layouts) == ["stock", "512/512", "1024/1024"]
    assert [layouts[name]["attention_page"] for name in layouts] == [2560, 512, 1024]
    assert [layouts[name]["scheduler_block"] for name in layouts] == [10240, 2048, 4096]
    assert [layouts[name]["ladders"]["8192"]["positions"] for name in layouts] == [
        [7680],
        [4096, 6144, 7680],
        [4096, 7168],
    ]


def test_auto_is_the_split_with_the_most_tokens(glm_report):
    layouts = glm_report["layouts"]
    tokens = {name: layout["tokens_of_cache"] for name, layout in layouts.items()}
    assert glm_report["auto"] == max(("512/512", "1024/1024"), key=tokens.__getitem__)


def test_the_bytes_of_a_layout_add_up(glm_report):
    for layout in glm_report["layouts"].values():
        assert layout["blocks"] * layout["block_bytes"] <= glm_report["memory"]
        for group in layout["groups"]:
            assert group["content_bytes"] + group["wasted_bytes"] == layout["block_bytes"]
        states = [group for group in layout["groups"] if group["kind"] == "recurrent"]
        assert sum(group["layers"] for group in states) == 34
        assert layout["state_bytes"] == len(states) * layout["block_bytes"]
        assert layout["ladders"]["8192"]["bytes"] == (
            len(layout["ladders"]["8192"]["positions"]) * layout["state_bytes"]
        )
        requests = layout["requests"]
        assert requests["8192"] > requests["32768"] > requests["131072"] > 0


def test_twice_the_memory_serves_twice_the_blocks(glm):
    small, large = (report("--model", glm, "--memory", memory)["layouts"]["512/512"] for memory in ("8GiB", "16GiB"))
    assert large["blocks"] // 2 == small["blocks"]


def test_given_sizes_replace_the_usual_split(glm):
    layouts = report("--model", glm, "--tp", "4", "--target", "1024", "--mamba", "2048")["layouts"]
    assert "1024/2048" in layouts
    assert layouts["1024/2048"]["recurrent_page"] == 2048


def test_sm120_has_pages_of_1024_tokens(glm):
    assert "1024/1024" in report("--model", glm, "--capability", "12")["layouts"]


def test_another_hybrid_model_is_measured(tmp_path):
    layouts = report("--model", write(tmp_path, QWEN), "--tp", "2")["layouts"]
    # 16 heads of 128 x 128 and a window of 3 rows, against 1,024 bytes a token, in steps of 16 tokens.
    assert layouts["stock"]["attention_page"] == layouts["stock"]["recurrent_page"] == 544
    assert layouts["512/512"]["recurrent_page"] == 512
    assert sum(group["layers"] for group in layouts["stock"]["groups"]) == 8


def test_people_read_a_table(glm):
    result = run("--model", glm, "--tp", "4", "--dcp", "4", "--kv-cache-dtype", "fp8")
    assert result.exit_code == 0
    for text in ("stock", "split 512/512", "tokens of cache", "ladder of 8,192 tokens", "padding"):
        assert text in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dcp", "2"], "--dcp 2: give a divisor of --tp, 1"),
        (["--capability", "8"], "--capability 8: give 9, 10 or 12"),
        (["--target", "512"], "give --target and --mamba together"),
        (["--memory", "0"], "--memory 0: give more than nothing"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(glm, arguments, message):
    result = run("--model", glm, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_folder_without_a_model_is_refused(tmp_path):
    result = run("--model", str(tmp_path))
    assert result.exit_code == 2
    assert "name a folder with a config.json in it" in result.output


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "is no hybrid model"),
        ({"architectures": ["Unheard"], "model_type": "llama"}, "vLLM knows no architecture Unheard"),
        ({"model_type": "llama"}, "names no architecture"),
    ],
)
def test_a_model_without_recurrent_layers_is_refused(tmp_path, config, message):
    result = run("--model", write(tmp_path, config))
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("24gib", 24 << 30), ("1.5 GiB", 3 << 29), ("2GB", 2 * 10**9), ("3m", 3_000_000), ("7", 7)],
)
def test_memory_is_read_with_its_unit(text, size):
    assert read_memory(text) == size
