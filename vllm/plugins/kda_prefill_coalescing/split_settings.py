# SPDX-License-Identifier: Apache-2.0
"""What the two split-layout settings say, and whether it can work."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from vllm.plugins.kda_prefill_coalescing import SPLIT_MAMBA as MAMBA
from vllm.plugins.kda_prefill_coalescing import SPLIT_TARGET as TARGET
from vllm.v1.core.split_layout_planning import MLA_UNIT, candidates, nearest_multiples

AUTO: Literal["auto"] = "auto"
Size = int | Literal["auto"]


class SplitSettings(NamedTuple):
    """Page sizes in tokens, each a number or `auto`."""

    target: Size
    mamba: Size

    def given(self) -> tuple[int | None, int | None]:
        """Both sizes, None for one that is to be chosen."""
        return (None if self.target == AUTO else self.target), (None if self.mamba == AUTO else self.mamba)

    def contradicted_by(self, block_size: int, targets: Collection[int]) -> str:
        """Why `--block-size` cannot stand beside attention pages of one of `targets` tokens; empty where it can."""
        if block_size in targets:
            return ""
        sizes = " or ".join(str(size) for size in sorted(targets))
        return (
            f"--block-size {block_size} contradicts {TARGET}={self.target}, which makes pages of {sizes} tokens: "
            "leave one out"
        )

    def problems(self, unit: int) -> Iterator[str]:
        """Why an engine whose attention pages are multiples of `unit` tokens cannot use them."""
        target, mamba = self.given()
        for name, size in ((TARGET, target), (MAMBA, mamba)):
            if size is not None and size % unit:
                yield (
                    f"{name}={size} is not a multiple of {unit} tokens, which this engine's attention kernels need; "
                    f"{_nearest(size, unit)}"
                )
                return
        if None in (target, mamba) and not candidates(unit, target, mamba):
            every = ", ".join(f"{pair.target}/{pair.mamba}" for pair in candidates(unit)) or "none"
            yield (
                f"{TARGET}={self.target} and {MAMBA}={self.mamba} leave no pair to choose that keeps 8,192-token "
                f"spans coalesced; those that do: {every}"
            )


def read_size(name: str) -> Size | None:
    """The page size a setting names, or None where it is not set.

    Raises:
        ValueError: The value is no usable page size.
    """
    value = os.environ.get(name)
    if not value:
        return None
    if value == AUTO:
        return AUTO
    size = int(value) if value.isascii() and value.isdigit() else 0
    if size <= 0 or size % MLA_UNIT:
        raise ValueError(
            f"{name}={value!r} is neither auto nor a positive multiple of {MLA_UNIT} tokens; {_nearest(size, MLA_UNIT)}"
        )
    return size


def split_settings() -> SplitSettings | None:
    """Both settings, or None where the layout is stock's.

    Raises:
        ValueError: One is set without the other, or the recurrent size is no multiple of the target one.
    """
    target, mamba = read_size(TARGET), read_size(MAMBA)
    if target is None and mamba is None:
        return None
    if target is None or mamba is None:
        raise ValueError(f"set {TARGET} and {MAMBA} together, or neither")
    if isinstance(target, int) and isinstance(mamba, int) and mamba % target:
        raise ValueError(f"{MAMBA}={mamba} is not a multiple of {TARGET}={target}; {_nearest(mamba, target)}")
    return SplitSettings(target, mamba)


def _nearest(size: int, unit: int) -> str:
    sizes = nearest_multiples(size, unit)
    return f"the nearest that work are {sizes[0]} and {sizes[1]}" if len(sizes) == 2 else f"the nearest is {sizes[0]}"
