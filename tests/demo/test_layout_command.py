# SPDX-License-Identifier: Apache-2.0
"""`kda-prefill layout` shows stock's layout and split ones of any hybrid model, from its config.json."""

import json
import re

import pytest
from typer.testing import CliRunner

from vllm_kda_prefill import model_config
from vllm_kda_prefill.cli import app
from vllm_kda_prefill.layer_stubs import as_gpu
from vllm_kda_prefill.layout.command import read_memory
from vllm_kda_prefill.layout.report import EngineShape
from vllm_kda_prefill.model_config import GLM_SHAPES

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


def run(*arguments):
    # Verbose, for the other way switches logging off.
    return CliRunner().invoke(app, ["layout", *arguments, "--verbose"])


def report(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout[result.stdout.index("{") :])


@pytest.fixture(scope="module")
def glm_report():
    engine = "--tp 4 --dcp 4 --mtp 3 --kv-cache-dtype fp8 --memory 24GiB --max-model-len 131072".split()
    return report(*engine)


def test_stock_and_split_stand_side_by_side(glm_report):
    layouts = glm_report["layouts"]
    assert list(layouts) == ["stock", "512/512", "1024/1024"]
    assert [layouts[name]["attention_block"] for name in layouts] == [2560, 512, 1024]
    assert [layouts[name]["scheduler_block"] for name in layouts] == [10240, 2048, 4096]
    assert [layouts[name]["ladders"]["8192"]["positions"] for name in layouts] == [
        [5120, 7680],
        [4096, 6144, 7168, 7680],
        [4096, 6144, 7168],
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
        states = [group for group in layout["groups"] if group["kind"] == "mamba"]
        assert sum(group["layers"] for group in states) == 34
        assert layout["state_bytes"] == len(states) * layout["block_bytes"]
        assert layout["ladders"]["8192"]["bytes"] == (
            len(layout["ladders"]["8192"]["positions"]) * layout["state_bytes"]
        )
        requests = layout["requests"]
        assert requests["8192"] > requests["32768"] > requests["131072"] > 0


def test_twice_the_memory_serves_twice_the_blocks():
    small, large = (report("--memory", memory)["layouts"]["512/512"] for memory in ("8GiB", "16GiB"))
    assert large["blocks"] // 2 == small["blocks"]


def test_given_sizes_replace_the_usual_split():
    layouts = report("--tp", "4", "--target", "1024", "--mamba", "2048")["layouts"]
    assert "1024/2048" in layouts
    assert layouts["1024/2048"]["mamba_block"] == 2048


@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_sm120_has_blocks_of_512_tokens_in_packed_fp8(dtype):
    engine = ["--tp", "4", "--dcp", "4", "--mtp", "3", "--kv-cache-dtype"]
    found = report(*engine, dtype, "--capability", "12")["layouts"]["512/512"]
    assert (found["attention_block"], found["mamba_block"], found["scheduler_block"]) == (512, 512, 2048)
    # On SM12x a token has the bytes of one format, whatever the option says; on Hopper that is one of the formats.
    assert found == report(*engine, "fp8_ds_mla", "--capability", "9")["layouts"]["512/512"]


def test_stock_is_shown_without_the_patch():
    layouts = report("--capability", "12", "--tp", "4", "--kv-cache-dtype", "fp8")["layouts"]
    assert layouts["stock"]["attention_block"] == 3072


def test_another_hybrid_model_is_measured(tmp_path):
    layouts = report("--model", write(tmp_path, QWEN), "--tp", "2")["layouts"]
    # 16 heads of 128 x 128 and a window of 3 rows, against 1,024 bytes a token, in steps of 16 tokens.
    assert layouts["stock"]["attention_block"] == layouts["stock"]["mamba_block"] == 544
    assert layouts["512/512"]["mamba_block"] == 512
    assert sum(group["layers"] for group in layouts["stock"]["groups"]) == 8


def test_the_default_model_is_glm_5_3_flash(tmp_path):
    """The same as from a config.json of its shapes."""
    default, given = report("--tp", "4"), report("--tp", "4", "--model", write(tmp_path, GLM_SHAPES))
    assert default["layouts"] == given["layouts"]
    assert default["engine"].pop("model") == "GLM-5.3-Flash"
    assert given["engine"].pop("model") == str(tmp_path)
    assert default["engine"] == given["engine"]


TEXT = GLM_SHAPES["text_config"] | {"architectures": ["Glm5NextForCausalLM"]}


def test_a_text_only_configuration_is_measured_without_drafts(tmp_path):
    assert "512/512" in report("--model", write(tmp_path, TEXT))["layouts"]


@pytest.mark.parametrize("command", ["layout", "plan"])
@pytest.mark.parametrize(
    ("config", "found"),
    [
        (TEXT, "architecture Glm5NextForCausalLM, model_type 'glm5_next_text'"),
        (GLM_SHAPES | {"text_config": {"model_type": "glm5_next_text"}}, "no num_nextn_predict_layers in its"),
        (
            GLM_SHAPES | {"text_config": {"num_nextn_predict_layers": "x"}},
            "no num_nextn_predict_layers in its",
        ),
    ],
)
def test_drafts_name_the_configuration_they_need(tmp_path, command, config, found):
    result = CliRunner().invoke(app, [command, "--model", write(tmp_path, config), "--mtp", "3"])
    assert result.exit_code == 2
    assert result.output.startswith("error: --mtp 3: ")
    assert found in result.output
    for needed in ("Glm5NextForConditionalGeneration", "model_type 'glm5_next'", "num_nextn_predict_layers", "--mtp 0"):
        assert needed in result.output


def test_vllm_finds_drafts_by_the_model_type(tmp_path):
    """What the message says is what stock does."""
    write(tmp_path, TEXT)
    with as_gpu(9), pytest.raises(ValueError, match="--mtp 3: this model has no draft layers that vLLM finds"):
        EngineShape(tmp_path, mtp=3).vllm_config()
    with as_gpu(9), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_config, "draft_problem", lambda config: "")
        with pytest.raises(NotImplementedError, match="Unsupported speculative method: 'mtp'"):
            EngineShape(tmp_path, mtp=3).vllm_config()


def test_sizes_that_cannot_work_name_the_options():
    result = run("--target", "640", "--mamba", "640")
    assert "--target=640 is not a multiple of 512 tokens" in str(result.exception)
    result = run("--target", "1024", "--mamba", "1536")
    assert "--mamba=1536 is not a multiple of --target=1024; the nearest that work are 1024 and 2048" in str(
        result.exception
    )


def test_people_read_a_table():
    result = run("--tp", "4", "--dcp", "4", "--kv-cache-dtype", "fp8")
    assert result.exit_code == 0
    for text in ("stock", "split 512/512", "tokens of cache", "ladder of 8,192 tokens", "padding"):
        assert text in result.output
    assert re.search(r"\d Mamba \d+ x 512", result.output)
    assert "recurrent" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dcp", "2"], "--dcp 2: give a divisor of --tp, 1"),
        (["--capability", "8"], "--capability 8: give 9, 10 or 12"),
        (["--target", "512"], "--target 512: give --target and --mamba together"),
        (["--mamba", "512"], "--mamba 512: give --target and --mamba together"),
        (["--memory", "0"], "--memory 0: give more than nothing"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(arguments, message):
    result = run(*arguments)
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
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("24gib", 24 << 30), ("1.5 GiB", 3 << 29), ("2GB", 2 * 10**9), ("3m", 3_000_000), ("7", 7)],
)
def test_memory_is_read_with_its_unit(text, size):
    assert read_memory(text) == size
