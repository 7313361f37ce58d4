# SPDX-License-Identifier: Apache-2.0
"""An engine that cannot coalesce is refused with every reason; one that can gets its scheduler and worker."""

import copy
import operator
import re
from types import SimpleNamespace

import pytest
import torch

from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.attention import HiSparseConfig
from vllm.kda_prefill_variables import GATE, SPLIT_MAMBA, SPLIT_TARGET
from vllm.platforms.interface import DeviceCapability
from vllm.plugins.kda_prefill_coalescing import config_check, patches
from vllm_kda_prefill.planning import Layout
from vllm_kda_prefill.planning_platform import PlanningPlatform


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(
        PlanningPlatform,
        "get_device_capability",
        classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)),
    )


@pytest.fixture(autouse=True)
def fine_blocks(monkeypatch):
    for name in (SPLIT_TARGET, SPLIT_MAMBA):
        monkeypatch.setenv(name, "512")


@pytest.fixture(scope="module")
def plain():
    config = Layout(mtp=3).vllm_config()
    config.parallel_config.tensor_parallel_size = 4
    config.parallel_config.cp_kv_cache_interleave_size = 16
    config.cache_config.cache_dtype = "fp8_ds_mla"
    return config


@pytest.fixture
def config(plain):
    """A configuration that meets every condition; tests change what they are about."""
    parallel, model = plain.parallel_config, plain.model_config
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architecture=model.architecture,
            dtype=model.dtype,
            enable_sleep_mode=model.enable_sleep_mode,
            hf_text_config=copy.copy(model.hf_text_config),
            runner_type="generate",
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=4,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=16,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            prefill_context_parallel_size=parallel.prefill_context_parallel_size,
            enable_expert_parallel=parallel.enable_expert_parallel,
            worker_cls="auto",
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True,
            block_size=512,
            user_specified_block_size=False,
            mamba_cache_mode="align",
            cache_dtype="fp8_ds_mla",
            mamba_cache_dtype="auto",
            prefix_match_unit=None,
            mamba_ssm_cache_dtype="auto",
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None, max_num_batched_tokens=8192),
        speculative_config=SimpleNamespace(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=None),
        lora_config=None,
        kv_transfer_config=None,
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        additional_config={},
        use_v2_model_runner=True,
    )


def test_a_real_configuration_meets_every_condition(plain):
    assert list(config_check.unmet_conditions(plain)) == []


def test_an_engine_that_can_coalesce_gets_scheduler_and_worker(config):
    config_check.check(config)
    config_check.check(config)
    assert config.scheduler_config.scheduler_cls.endswith("coalescing_scheduler.create_scheduler")
    assert config.parallel_config.worker_cls.endswith("coalescing_worker.CoalescingWorker")


def set_capability(value):
    def change(config, monkeypatch):
        monkeypatch.setattr(PlanningPlatform, "get_device_capability", classmethod(lambda cls, device_id=0: value))

    return change


def set_variable(name, value):
    def change(config, monkeypatch):
        monkeypatch.setenv(name, value)

    return change


def put(part, name, value):
    def change(config, monkeypatch):
        target = operator.attrgetter(part)(config) if part else config
        if isinstance(target, dict):
            target[name] = value
        else:
            setattr(target, name, value)

    return change


CASES = {
    "model": (put("model_config", "architecture", "LlamaForCausalLM"), "LlamaForCausalLM, not GLM-5.3-Flash"),
    "draft runner": (put("model_config", "runner_type", "draft"), "the runner is draft: leave out --runner"),
    "pooling": (put("model_config", "runner_type", "pooling"), "the runner is pooling: leave out --runner"),
    "dtype": (put("model_config", "dtype", torch.float16), "pass --dtype bfloat16"),
    "prefix caching": (put("cache_config", "enable_prefix_caching", False), "pass --enable-prefix-caching"),
    "cache mode": (put("cache_config", "mamba_cache_mode", "all"), "pass --mamba-cache-mode align"),
    "more ranks than attention heads": (
        put("model_config.hf_text_config", "num_attention_heads", 2),
        "4 ranks cannot share 2 attention heads: pass --tensor-parallel-size 2",
    ),
    "more ranks than KDA heads": (
        put("model_config.hf_text_config", "linear_num_heads", 2),
        "4 ranks cannot share 2 KDA heads: pass --tensor-parallel-size 2",
    ),
    "window dtype": (put("cache_config", "mamba_cache_dtype", "float32"), "leave out --mamba-cache-dtype"),
    "state dtype": (put("cache_config", "mamba_ssm_cache_dtype", "bfloat16"), "leave out --mamba-ssm-cache-dtype"),
    "match unit": (put("cache_config", "prefix_match_unit", 8), "pass --prefix-match-unit 16"),
    "batch invariance": (set_variable("VLLM_BATCH_INVARIANT", "1"), "unset VLLM_BATCH_INVARIANT"),
    "runner": (put("", "use_v2_model_runner", False), "set VLLM_USE_V2_MODEL_RUNNER=1"),
    "pipeline": (put("parallel_config", "pipeline_parallel_size", 2), "--pipeline-parallel-size 1"),
    "data": (put("parallel_config", "data_parallel_size", 2), "--data-parallel-size 1"),
    "decode context": (
        put("parallel_config", "decode_context_parallel_size", 4),
        "128 .index_topk 2048 in rows of 16.: pass --decode-context-parallel-size 1",
    ),
    "prefill context": (
        put("parallel_config", "prefill_context_parallel_size", 2),
        "--prefill-context-parallel-size 1",
    ),
    "experts": (put("parallel_config", "enable_expert_parallel", True), "leave out --enable-expert-parallel"),
    "lora": (put("", "lora_config", object()), "leave out --enable-lora"),
    "HiSparse": (put("attention_config", "hisparse_config", HiSparseConfig()), "hisparse_config out of"),
    "its connector": (
        put("", "kv_transfer_config", KVTransferConfig(kv_connector="HiSparseConnector", kv_role="kv_both")),
        "leave HiSparseConnector out of --kv-transfer-config",
    ),
    "sleep": (put("model_config", "enable_sleep_mode", True), "leave out --enable-sleep-mode"),
    "dynamic": (
        put("speculative_config", "num_speculative_tokens_per_batch_size", [(1, 2, 3)]),
        "speculation is dynamic",
    ),
    "triton": (put("additional_config", "kda_prefill_backend", "triton"), "which exports no states: leave"),
    "unknown backend": (
        put("additional_config", "kda_prefill_backend", "cuda"),
        "backend 'cuda': set .* to one of auto",
    ),
    "backend of other GPUs": (
        put("additional_config", "kda_prefill_backend", "b12x"),
        r"it needs SM120 or SM121, this device is SM90\): leave",
    ),
    "gate bound": (put("model_config.hf_text_config", "linear_lower_bound", -6.0), r"is -6.0, .* serve it with"),
    "head size": (put("model_config.hf_text_config", "linear_head_dim", 64), "head size is 64, .* serve it with"),
    "old GPU": (set_capability(DeviceCapability(8, 0)), r"this device \(SM80\): use SM90"),
    "no GPU": (set_capability(None), r"this device \(no CUDA GPU\): use SM90"),
    "scheduler": (put("scheduler_config", "scheduler_cls", "my.Scheduler"), "leave out --scheduler-cls"),
    "worker": (put("parallel_config", "worker_cls", "my.Worker"), "leave out --worker-cls"),
}


# The backend is looked at only where the one before is in order.
ABOUT_THE_KERNEL = ("unknown backend", "backend of other GPUs", "gate bound", "head size")


@pytest.mark.parametrize("case", CASES)
def test_an_unmet_condition_is_refused_with_a_hint(case, config, monkeypatch):
    change, message = CASES[case]
    change(config, monkeypatch)
    assert len(list(config_check.unmet_conditions(config))) == 1
    with pytest.raises(ValueError, match=message):
        config_check.check(config)
    assert not str(config.scheduler_config.scheduler_cls).startswith("vllm.")


def test_all_unmet_conditions_are_named_at_once(config, monkeypatch):
    # Decode context and heads are asked about where the model is right.
    heads = ("more ranks than attention heads", "more ranks than KDA heads")
    apart = ("no GPU", "cache mode", "draft runner", "decode context", *heads, *ABOUT_THE_KERNEL)
    together = [name for name in CASES if name not in apart]
    for name in together:
        CASES[name][0](config, monkeypatch)
    with pytest.raises(ValueError, match=f"{GATE}=1") as error:
        config_check.check(config)
    assert "\n" not in str(error.value)
    for name in together:
        assert re.search(CASES[name][1], str(error.value)), name


def test_copies_of_an_accepted_configuration_pass(monkeypatch):
    """A drafter may have a cache dtype that the engine could not be served with; what was refused stays refused."""
    monkeypatch.setattr(VllmConfig, "try_verify_and_update_config", VllmConfig.try_verify_and_update_config)
    config = copy.deepcopy(Layout(dcp=1, mtp=3).vllm_config())
    patches._rebind_config_update()
    assert config.model_config.config_updated
    assert not config.scheduler_config.scheduler_cls
    config.cache_config.mamba_ssm_cache_dtype = "bfloat16"
    with pytest.raises(ValueError, match="leave out --mamba-ssm-cache-dtype"):
        config.try_verify_and_update_config()
    config.cache_config.mamba_ssm_cache_dtype = "float32"
    config.try_verify_and_update_config()
    assert config.scheduler_config.scheduler_cls == config_check.SCHEDULER
    config.cache_config.mamba_ssm_cache_dtype = "bfloat16"
    config.try_verify_and_update_config()


def test_a_draft_model_or_no_model_is_let_through(config):
    config.model_config.architecture, config.model_config.runner_type = "LlamaForCausalLM", "draft"
    config.scheduler_config.scheduler_cls = config_check.SCHEDULER
    config_check.check(config)
    config.model_config = None
    config_check.check(config)
    assert config.parallel_config.worker_cls == "auto"


@pytest.mark.parametrize(
    ("tensor", "drafts", "budget", "warned"),
    [(4, 3, 8192, False), (4, 0, 8192, False), (8, 3, 8192, True), (4, 2, 8192, True), (4, 3, 4096, True)],
)
def test_an_unqualified_setting_runs_with_one_warning(config, monkeypatch, tensor, drafts, budget, warned):
    warnings = []
    monkeypatch.setattr(config_check.logger, "warning_once", lambda *args: warnings.append(args))
    config.parallel_config.tensor_parallel_size = tensor
    config.speculative_config.num_speculative_tokens = drafts
    config.scheduler_config.max_num_batched_tokens = budget
    config_check.check(config)
    assert bool(warnings) == warned
