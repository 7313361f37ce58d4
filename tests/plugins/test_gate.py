# SPDX-License-Identifier: Apache-2.0
"""Gate off: stock vLLM, and of this fork the gate's file and its names. Gate on: bound once, in every process."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from vllm.kda_prefill_variables import GATE

ENGINE_CONFIG = """
    import vllm.platforms
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class NoDevice(Platform):
        _enum, device_name, device_type, dispatch_key = PlatformEnum.OOT, "none", "cuda", "CUDA"
        supported_quantization = []
        support_hybrid_kv_cache = classmethod(lambda cls: True)
        check_and_update_config = classmethod(lambda cls, config: None)
        is_pin_memory_available = classmethod(lambda cls: False)
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))

    vllm.platforms.current_platform = NoDevice()
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.config import ModelConfig, SchedulerConfig, VllmConfig
    config = VllmConfig(
        scheduler_config=SchedulerConfig(max_model_len=8192, is_encoder_decoder=False)
    )
"""


def run(code, **environment):
    """Run `code` in a fresh interpreter; it prints one JSON line last."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


REPORT = """
    import json, pathlib, sys
    import kda_prefill_finder
    root = str(pathlib.Path(kda_prefill_finder.__file__).parents[1])
    ours = sorted(
        name for name, module in sys.modules.items()
        if name.startswith("vllm") and (getattr(module, "__file__", None) or "").startswith(root)
        and "site-packages" not in module.__file__
    )
    from vllm.config import VllmConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform
    import vllm.envs
    print(json.dumps({
        "modules": ours,
        "stock_config": VllmConfig.try_verify_and_update_config.__qualname__,
        "stock_align": Platform._align_hybrid_block_size.__func__.__code__.co_filename.endswith("interface.py"),
        "model": ModelRegistry.models["Glm5NextForCausalLM"].module_name,
        "variables": [n for n in vllm.envs.environment_variables if "B12X_KDA" in n or "GLM53" in n],
        "config_function": VllmConfig.try_verify_and_update_config.__code__.co_filename.endswith("config/vllm.py"),
    }))
"""


@pytest.mark.parametrize("value", [None, "off"])
def test_gate_off_loads_the_gate_only_and_changes_nothing(value):
    environment = {} if value is None else {GATE: value}
    report = run(textwrap.dedent(ENGINE_CONFIG) + textwrap.dedent(REPORT), **environment)
    assert report == {
        "modules": ["vllm.kda_prefill_variables", "vllm.plugins.kda_prefill_coalescing"],
        "stock_config": "VllmConfig.try_verify_and_update_config",
        "stock_align": True,
        "model": "vllm.models.glm5next",
        "variables": [],
        "config_function": True,
    }


def test_the_gate_imports_only_its_names():
    code = """
    import json, sys, types
    import importlib.util, pathlib, kda_prefill_finder
    overlay = pathlib.Path(kda_prefill_finder.__file__).parents[1] / "vllm"
    # A package of this fork's files alone: an import of stock vLLM would fail.
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm"].__path__ = [str(overlay)]
    spec = importlib.util.spec_from_file_location("gate", overlay / "plugins/kda_prefill_coalescing/__init__.py")
    module = importlib.util.module_from_spec(spec)
    known = set(sys.modules)
    spec.loader.exec_module(module)
    module.register()
    print(json.dumps(sorted(set(sys.modules) - known)))
    """
    assert run(code) == ["vllm.kda_prefill_variables"]


def test_gate_on_binds_every_patch_once():
    code = (
        textwrap.dedent(ENGINE_CONFIG.split("from vllm.config", maxsplit=1)[0])
        + textwrap.dedent("""
    from vllm.plugins.kda_prefill_coalescing import register
    register()
    register()
    """)
        + textwrap.dedent(REPORT)
    )
    report = run(code, **{GATE: "1"})
    assert report["model"] == "vllm.models.glm5next.coalesced"
    assert not report["config_function"]
    assert not report["stock_align"]
    assert len(report["variables"]) == 5
    # Nothing that needs a device or the engine is loaded before vLLM asks for it.
    assert "vllm.models.glm5next.coalesced" not in report["modules"]
    assert "vllm.v1.core.sched.coalescing_scheduler" not in report["modules"]


@pytest.mark.parametrize(
    ("value", "on"),
    [(None, False), ("", False), ("0", False), ("off", False), ("No", False), ("1", True), (" TRUE ", True)],
)
def test_values_of_the_gate(value, on):
    from vllm.plugins.kda_prefill_coalescing import is_on

    assert is_on(value) is on


def test_a_value_that_is_neither_on_nor_off_is_refused():
    from vllm.plugins.kda_prefill_coalescing import is_on

    with pytest.raises(ValueError, match=rf"{GATE}='maybe' is neither on nor off; set it to 1 or 0"):
        is_on("maybe")
