# SPDX-License-Identifier: Apache-2.0
"""Every worker process binds the same rows from the one scheduler output that the executor broadcasts."""

import multiprocessing

import numpy as np
import pytest
import torch.distributed as dist

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.utils.network_utils import get_open_port
from vllm.v1.attention.backends.checkpoint_rows import bind_rows
from vllm.v1.core.prefill_plan import plans_of
from vllm_kda_prefill.planning import Engine, Layout

LAYOUT = Layout(dcp=4, mtp=3, mamba_groups=2)
GROUPS = (1, 2)


def worker(rank, ranks, port, handle, shift, results):
    """Receive a step as a vLLM worker does, bind it, and compare with the other ranks."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    queue = MessageQueue.create_from_handle(handle, rank)
    queue.wait_until_ready()
    output = queue.dequeue()
    requests = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    ids = list(output.num_scheduled_tokens)
    scheduled = [output.num_scheduled_tokens[request_id] for request_id in ids]
    mine: object
    try:
        rows = bind_rows(
            plans_of(output),
            request_ids=ids,
            num_computed_tokens=[requests[request_id] + shift for request_id in ids],
            num_scheduled_tokens=scheduled,
            query_start_loc=np.concatenate([[0], np.cumsum(scheduled)]),
            group_ids=GROUPS,
            num_blocks=LAYOUT.num_blocks,
        )
        mine = (ids, rows.offsets.tolist(), {group: rows.block_ids[group].tolist() for group in GROUPS})
    except RuntimeError as error:
        mine = str(error)
    everyone: list = [None] * ranks
    dist.all_gather_object(everyone, mine)
    results.put((rank, everyone))
    dist.destroy_process_group()


def broadcast(ranks, shifts):
    """What each rank bound, from `ranks` processes; a rank's idea of its batch is off by its shift."""
    engine = Engine.build(LAYOUT)
    engine.add("long", list(range(5000)))
    engine.add("short", list(range(70_000, 72_500)))
    output = engine.scheduler.schedule()
    port = get_open_port()
    queue = MessageQueue(ranks, ranks)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=worker, args=(rank, ranks, port, queue.export_handle(), shifts[rank], results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    queue.wait_until_ready()
    queue.enqueue(output)
    answers = dict(results.get() for _ in processes)
    for process in processes:
        process.join(60)
    return answers


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_binds_the_same_rows(ranks):
    answers = broadcast(ranks, [0] * ranks)
    assert sorted(answers) == list(range(ranks))
    ids, offsets, block_ids = answers[0][0]
    assert ids == ["long", "short"]
    assert offsets == [[1024, 3072, 4096, 4608], [512, 1536, 2048, 0]]
    assert all(0 not in block_ids[group][0][:3] for group in GROUPS)
    for everyone in answers.values():
        assert everyone == [answers[0][0]] * ranks


def test_a_rank_whose_batch_differs_says_so():
    answers = broadcast(2, [0, 512])
    good, bad = answers[0]
    assert good[0] == ["long", "short"]
    assert "KDA prefill plan of request long for [0, 5000)" in bad
    assert "its row 0 computes [512, 5512)" in bad
