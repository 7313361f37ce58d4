# SPDX-License-Identifier: Apache-2.0
"""Ranks on one GPU get from shared memory what the same collectives give over gloo, under vLLM's own groups."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from tests.engine import one_gpu
from vllm.utils.network_utils import get_open_port

RANKS = 4


def on_ranks(work, ranks, *arguments):
    """Run `work(rank, ranks, port, *arguments)` in a process each; all must end well."""
    context = multiprocessing.get_context("fork")
    port = get_open_port()
    processes = [context.Process(target=work, args=(rank, ranks, port, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * ranks


def of_rank(rank, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives(rank, ranks, port):
    with one_gpu.group(rank, ranks, port):
        gloo = dist.new_group(list(range(ranks)), backend="gloo")
        shared = dist.new_group(list(range(ranks)), backend=one_gpu.BACKEND)
        inputs = [of_rank(other, ranks * 2, 3) for other in range(ranks)]
        mine = inputs[rank]

        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            ours, theirs = mine.clone(), mine.clone()
            dist.all_reduce(ours, op, group=shared)
            dist.all_reduce(theirs, op, group=gloo)
            torch.testing.assert_close(ours, theirs)

        parts = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(parts, mine, group=shared)
        assert all(torch.equal(part, other) for part, other in zip(parts, inputs, strict=True))

        gathered = torch.empty(ranks * ranks * 2, 3)
        dist.all_gather_into_tensor(gathered, mine, group=shared)
        assert torch.equal(gathered, torch.cat(inputs))

        scattered = torch.empty(2, 3)
        dist.reduce_scatter_tensor(scattered, mine, group=shared)
        torch.testing.assert_close(scattered, sum(inputs)[2 * rank : 2 * rank + 2])

        dist.reduce_scatter_tensor(scattered, mine, dist.ReduceOp.MAX, group=shared)
        assert torch.equal(scattered, torch.stack(inputs).amax(0)[2 * rank : 2 * rank + 2])

        exchanged = torch.empty(ranks * 2, 3)
        dist.all_to_all_single(exchanged, mine, group=shared, async_op=True).wait()
        assert torch.equal(exchanged, torch.cat([other[2 * rank : 2 * rank + 2] for other in inputs]))

        sent = mine.clone()
        dist.broadcast(sent, 1, group=shared)
        assert torch.equal(sent, inputs[1])

        received = [torch.empty_like(mine) for _ in range(ranks)] if rank == ranks - 1 else None
        dist.gather(mine, received, dst=ranks - 1, group=shared)
        assert received is None or all(torch.equal(a, b) for a, b in zip(received, inputs, strict=True))

        # Sums are in rank order: 1 is lost in the second, and with another order would not be.
        order = torch.tensor([(1.0, 2.0**24, -(2.0**24), 0.0)[rank]])
        dist.all_reduce(order, group=shared)
        assert order.item() == (0 if ranks == 4 else 2.0**24)

        # Sums of half the width are rounded once, and are the same bits on every rank.
        half = torch.tensor([(2048, 1, 1, 1)[rank]], dtype=torch.float16)
        dist.all_reduce(half, group=shared)
        assert half.item() == (2052 if ranks == 4 else 2048)
        total = mine.bfloat16()
        dist.all_reduce(total, group=shared)
        assert torch.equal(total, torch.stack([other.bfloat16().float() for other in inputs]).sum(0).bfloat16())


@pytest.mark.parametrize("ranks", [2, RANKS])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_collective_gives_what_gloo_gives(ranks):
    on_ranks(collectives, ranks)


def in_pieces(rank, ranks, port):
    one_gpu.CAPACITY = 1 << 12
    with one_gpu.group(rank, ranks, port):
        total = of_rank(rank, 5000)
        dist.all_reduce(total)
        torch.testing.assert_close(total, sum(of_rank(other, 5000) for other in range(ranks)))
        scattered = torch.empty(2500)
        dist.reduce_scatter_tensor(scattered, of_rank(rank, 5000))
        assert torch.equal(scattered, total[2500 * rank : 2500 * (rank + 1)])
        nothing = torch.empty(0, 4)
        dist.all_reduce(nothing)
        dist.all_gather_into_tensor(nothing, nothing)
        dist.reduce_scatter_tensor(nothing, nothing)
        dist.all_to_all_single(nothing, nothing)


def test_what_is_larger_than_a_segment_goes_in_pieces():
    on_ranks(in_pieces, 2)


def own_slices(rank, ranks, port):
    with one_gpu.group(rank, ranks, port) as group:
        received = []
        exchange = group._segments.exchange

        def counted(*arguments, **options):
            parts = exchange(*arguments, **options)
            received.append(sum(part.numel() for part in parts))
            return parts

        group._segments.exchange = counted
        whole = of_rank(rank, 6)
        dist.reduce_scatter_tensor(torch.empty(3), whole)
        dist.all_to_all_single(torch.empty(6), whole)
        assert sum(received) == 2 * 6
        received.clear()
        dist.gather(whole, [torch.empty(6) for _ in range(ranks)] if rank == 1 else None, dst=1)
        assert sum(received) == (12 if rank == 1 else 0)


def test_ranks_receive_nothing_that_they_would_drop():
    on_ranks(own_slices, 2)


def a_rank_is_missing(rank, ranks, port):
    with one_gpu.group(rank, ranks, port):
        one_gpu.TIMEOUT = 0.2
        if rank == 0:
            with pytest.raises(TimeoutError, match=r"rank 1 of 2 did not come to a collective within 0\.2 s"):
                dist.all_reduce(torch.ones(1))


def test_a_rank_that_does_not_come_is_named():
    on_ranks(a_rank_is_missing, 2)


def vllms_groups(rank, ranks, port, patch):
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    patch.setenv(one_gpu.RANKS, str(ranks))
    patch.setattr(type(current_platform), "device_name", "cpu")
    one_gpu.install()
    config = VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks, decode_context_parallel_size=2, distributed_executor_backend="mp"
        )
    )
    with set_current_vllm_config(config):
        method = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(ranks, rank, method, rank, current_platform.dist_backend)
        parallel_state.initialize_model_parallel(ranks, decode_context_model_parallel_size=2)
    tensor, context = parallel_state.get_tp_group(), parallel_state.get_dcp_group()
    assert isinstance(tensor.device_group, one_gpu.OneGpuGroup)
    mine = torch.full((3, 4), float(rank))
    assert torch.equal(tensor.all_reduce(mine), torch.full((3, 4), float(sum(range(ranks)))))
    assert torch.equal(mine, torch.full((3, 4), float(rank)))
    assert context.all_gather(mine, dim=1)[0].tolist() == [float(other) for other in context.ranks for _ in range(4)]
    assert torch.equal(context.reduce_scatter(torch.ones(2, 6, 3), dim=1), torch.full((2, 3, 3), 2.0))
    rows = tensor.all_gatherv(torch.full((rank + 1, 2), rank), dim=0, sizes=[1, 2, 3, 4])
    assert rows[:, 0].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    sent = tensor.broadcast_tensor_dict({"x": torch.ones(2)} if rank == 0 else None, src=0)
    assert sent is not None
    assert sent["x"].tolist() == [1, 1]
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def test_vllms_groups_run_over_it(monkeypatch):
    on_ranks(vllms_groups, RANKS, monkeypatch)
