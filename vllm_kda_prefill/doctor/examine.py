# SPDX-License-Identifier: Apache-2.0
"""All checks of a host, in the order in which a server meets them."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm_kda_prefill.doctor import engine, hardware, installation, kernels, variables
from vllm_kda_prefill.doctor.findings import Colour, Finding, from_server, red, yellow
from vllm_kda_prefill.model_config import model_problem
from vllm_kda_prefill.versions import kernel_state

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WANTED = "0.33.0"
"""vLLM's version; `upstream_sources` has the same, and cannot be imported without vLLM."""


def installed_vllm() -> str | None:
    """vLLM's version, without importing it; None where it is not installed."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def import_problem() -> str:
    """Why vLLM cannot be imported here, as one line; an empty string where it can."""
    from vllm_kda_prefill.console import quick_imports

    try:
        with quick_imports():
            import vllm_kda_prefill.layout.report  # noqa: F401
    except Exception as error:  # A variable or a library may be wrong in any way; it is one line.
        return f"{type(error).__name__}: {error}"
    return ""


def examine(flags: engine.Flags, assumed: hardware.Capability | None) -> list[Finding]:
    """Every check.

    Args:
        flags: Of the server.
        assumed: Compute capability to check for in place of this host's.
    """
    findings = [installation.version_finding(installed_vllm(), WANTED)]
    if findings[0].colour is Colour.RED:
        return findings
    problem = import_problem()
    if problem:
        return [*findings, red("vllm", f"vLLM cannot be imported: {problem}", "mend or unset what the line names")]
    import vllm.envs as envs

    findings += _installed()
    problems = {name: text for name in variables.OURS if (text := variables.problem_of(name))}
    pair = "" if problems.keys() & {variables.SPLIT_TARGET, variables.SPLIT_MAMBA} else variables.pair_problem()
    unreadable = variables.unreadable(os.environ, envs.environment_variables)
    findings += _variables(problems, pair)
    findings += variables.unreadable_findings(os.environ, unreadable)
    with variables.usable(problems | unreadable, bool(pair)):
        gpus = hardware.find_gpus()
        findings.append(hardware.gpu_finding(gpus, assumed))
        if gpus.count or assumed:
            findings.append(hardware.ranks_finding(gpus, flags.tp, find_spec("ray") is not None))
        return findings + _engine(flags, gpus, assumed or gpus.capability)


def _installed() -> list[Finding]:
    import torch

    from vllm.plugins.kda_prefill_coalescing.patches import UPSTREAM
    from vllm.plugins.kda_prefill_coalescing.upstream_sources import changed_sources

    plugins = [entry.name for entry in entry_points(group="vllm.general_plugins")]
    return [
        installation.source_finding(changed_sources(UPSTREAM), len({target for target, _ in UPSTREAM}), WANTED),
        installation.torch_finding(torch.__version__, torch.version.cuda),
        variables.plugin_finding(plugins, os.environ.get("VLLM_PLUGINS")),
    ]


def _variables(problems: dict[str, str], pair: str) -> list[Finding]:
    import vllm.envs as envs
    from vllm.plugins.kda_prefill_coalescing import is_on

    gate = os.environ.get(variables.GATE)
    bad_gate = problems.get(variables.GATE, "")
    known = {*envs.environment_variables, *variables.OURS}
    return [
        variables.gate_finding(gate, bad_gate, not bad_gate and is_on(gate)),
        *variables.value_findings(os.environ, problems),
        *variables.pair_finding(os.environ, pair),
        *variables.misspelt_findings(os.environ, known),
    ]


def _engine(flags: engine.Flags, gpus: hardware.Gpus, capability: hardware.Capability | None) -> list[Finding]:
    """What depends on the model and the flags; a step that cannot be taken ends the checks that need it."""
    folder = engine.model_folder(flags.model)
    problem = model_problem(folder, flags.mtp, glm_only=True)
    findings = engine.model_findings(flags.model, problem)
    if problem:
        return findings
    need = hardware.Need(flags.utilization, engine.weight_bytes(folder, flags.tp))
    try:
        with engine.on_gpu(capability):
            config = engine.make_config(flags, folder)
            about_kernels, unmet = _unmet(config)
            findings += _kernels(config, flags.backend, capability, about_kernels)
    except Exception as error:  # vLLM checks flags in many ways; a server would show this too.
        return [*findings, engine.refusal_finding(error), hardware.memory_finding(gpus, need)]
    named = f"TP{flags.tp}, DCP{flags.dcp}, {flags.mtp} draft tokens, KV cache {flags.kv_cache_dtype}"
    findings += engine.configuration_findings(unmet, named)
    try:
        layout = engine.measure_layout(flags, folder, capability)
    except Exception as error:
        if not unmet:
            findings.append(from_server("blocks", str(error) or type(error).__name__))
        return [*findings, hardware.memory_finding(gpus, need)]
    findings += engine.block_findings(layout)
    asked, longest = hardware.budget(gpus, flags.utilization), config.model_config.max_model_len
    if asked is not None and need.weights is not None and need.weights < asked:
        tokens = layout.tokens_of_cache(asked - need.weights, longest)
        need = hardware.Need(flags.utilization, need.weights, tokens, longest)
    return [*findings, hardware.memory_finding(gpus, need)]


def _unmet(config: VllmConfig) -> tuple[list[str], list[str]]:
    """What a server with the gate on would say at start: of its kernel, and of the rest."""
    from vllm.plugins.kda_prefill_coalescing import index_rows
    from vllm.plugins.kda_prefill_coalescing.config_check import unmet_by_kernel, unmet_conditions

    with index_rows.bound():
        about_kernels = list(unmet_by_kernel(config))
        return about_kernels, [line for line in unmet_conditions(config) if line not in about_kernels]


def _kernels(
    config: VllmConfig, backend: str, capability: hardware.Capability | None, about_kernels: list[str]
) -> list[Finding]:
    from vllm.model_executor.layers.mamba.ops.kda_prefill.select import choices

    # The GPU's own line has said this.
    lines = [line for line in about_kernels if not line.startswith("no kernel exports states on this device")]
    if lines:
        return [from_server(kernels.CHECK, line) for line in lines]
    if capability is None:
        return [yellow(kernels.CHECK, "which kernel exports states depends on the GPU", "give --capability 12.1")]
    text, state = config.model_config.hf_text_config, kernel_state()
    allowed = choices(
        backend, capability=capability, head_dim=text.linear_head_dim, lower_bound=text.linear_lower_bound
    )
    if len(lines) < len(about_kernels):
        return []
    return [kernels.kernel_finding(backend, allowed, kernels.missing_parts(state), state)]
