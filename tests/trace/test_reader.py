# SPDX-License-Identifier: Apache-2.0
"""Both formats are read; anything wrong is one line with its place, and nothing of the file is used."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.trace.by_hand import mooncake_line
from vllm_kda_prefill.trace.errors import TraceError
from vllm_kda_prefill.trace.reader import read_traces

GOOD = mooncake_line(1000, [1, 2])


def session(*requests: object, **head: object) -> str:
    return json.dumps({"block_size": 64, "requests": list(requests), **head})


def turn(tokens: int, ids: list[int], t: float = 0) -> dict[str, object]:
    return {"t": t, "in": tokens, "out": 3, "hash_ids": ids}


def test_mooncake_lines_share_nodes_while_their_ids_are_equal(write):
    trace = read_traces([write(GOOD, mooncake_line(1500, [1, 3, 2], 2500), "", mooncake_line(700, [2, 1], 1000))])
    first, third, second = trace.prompts
    assert (first.tokens, second.tokens, third.tokens) == (1000, 1500, 700)
    assert (first.time, second.time, third.time) == (0, 2.5, 1)
    assert first.output_tokens == 7
    assert first.path[0] == second.path[0]
    assert len({*first.path, *second.path, *third.path}) == 2 + 2 + 2
    assert (trace.tokens, trace.longest, trace.name) == (3200, 1500, "trace.jsonl")


def test_gzip_is_told_by_content(tmp_path):
    path = tmp_path / "no_suffix"
    path.write_bytes(gzip.compress(f"{GOOD}\n".encode()))
    assert read_traces([path]).tokens == 1000


def test_prompts_of_several_files_share_blocks_in_order_of_time(write):
    trace = read_traces([write(GOOD, mooncake_line(512, [1], 9), name="a"), write(GOOD, name="b")])
    assert [prompt.tokens for prompt in trace.prompts] == [1000, 1000, 512]
    assert trace.prompts[0].path == trace.prompts[1].path
    assert trace.name == "2 files"


def test_first_requests_cut_at_the_longest(write):
    trace = read_traces([write(mooncake_line(1500, [1, 2, 3]), mooncake_line(512, [1]))]).first(1, 1024)
    (prompt,) = trace.prompts
    assert (prompt.tokens, len(prompt.path)) == (1024, 2)


def test_a_session_is_read_with_its_own_block_size(write):
    path = write(session(turn(130, [5, 6, 7]), turn(64, [5], t=1.5), turn(65, [5, 8], t=2)))
    first, second, third = read_traces([path]).prompts
    assert (first.block_size, first.tokens, second.time) == (64, 130, 1.5)
    assert first.path[0] == second.path[0] == third.path[0]


def test_a_session_may_leave_out_the_id_of_a_last_short_block(write):
    one, other = read_traces([write(session(turn(130, [5, 6]), turn(130, [5, 6])))]).prompts
    assert one.path[:2] == other.path[:2]
    assert len(one.path) == 3
    assert one.path[2] != other.path[2]


@pytest.mark.parametrize(("scope", "is_shared"), [({}, False), ({"hash_id_scope": "global"}, True)])
def test_ids_of_a_session_are_its_own_unless_it_says_otherwise(write, scope, is_shared):
    paths = [write(session(turn(64, [5]), **scope), name=f"{number}.json") for number in range(2)]
    one, other = read_traces(paths).prompts
    assert (one.path == other.path) is is_shared


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "Invalid JSON: EOF while parsing"),
        ("nonsense", "Invalid JSON: expected ident"),
        ("[]", "Input should be an object"),
        (mooncake_line(1000, [1]), "hash_ids has 1 ids; input_length 1000 in blocks of 512 tokens needs 2"),
        (mooncake_line(1000, [1, 2, 3]), "hash_ids has 3 ids; input_length 1000 in blocks of 512 tokens needs 2"),
        (mooncake_line(0, []), "input_length 0: Input should be greater than or equal to 1"),
        (mooncake_line(2**24 + 1, [1]), "input_length 16777217: Input should be less than or equal to 16777216"),
        (GOOD.replace("1000", '"1000"'), "input_length '1000': Input should be a valid integer"),
        (GOOD.replace("1000", "true"), "input_length True: Input should be a valid integer"),
        (GOOD.replace("1000", "1000.5"), "input_length 1000.5: Input should be a valid integer"),
        (GOOD.replace("[1, 2]", "[1, null]"), "hash_ids.1 None: Input should be a valid integer"),
        (GOOD.replace("[1, 2]", "12"), "hash_ids 12: Input should be a valid array"),
        (GOOD.replace('"output_length"', '"other"'), "output_length: Field required"),
        (GOOD.replace('"timestamp": 0', '"timestamp": -1'), "timestamp -1"),
        (GOOD.replace('"timestamp": 0', '"timestamp": NaN'), "timestamp nan: Input should be a finite number"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_read(write, bad, message):
    with pytest.raises(TraceError) as error:
        read_traces([write(GOOD, "", bad, GOOD)])
    text = str(error.value)
    assert "trace.jsonl: line 3: " in text
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (session(turn(64, [5]), {"t": 0, "in": 3, "out": 1}), ": request 2: hash_ids: Field required"),
        (session(turn(130, [5])), ": request 1: hash_ids has 1 ids; in 130 in blocks of 64 tokens needs 3"),
        (session(turn(128, [5, 6, 7])), ": request 1: hash_ids has 3 ids; in 128 in blocks of 64 tokens needs 2"),
        (session(turn(-1, [])), ": request 1: in -1: Input should be greater than or equal to 1"),
        (session("x"), ": request 1: 'x': Input should be a valid dictionary"),
        (session(), ": requests: List should have at least 1 item"),
        (session(turn(64, [5]), block_size=0), ": block_size 0: Input should be greater than or equal to 1"),
        (session(turn(64, [5]), hash_id_scope="here"), ": hash_id_scope 'here': Input should be 'local' or 'global'"),
        ('{\n"block_size": 64,\n"requests": [}\n', ": line 3: it is no JSON"),
        ("[" * 100_000, ": line 1: it is no JSON"),
    ],
)
def test_a_bad_session_is_named(write, content, message):
    with pytest.raises(TraceError) as error:
        read_traces([write(content, name="session.json")])
    assert f"session.json{message}" in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path, write):
    short = tmp_path / "short.gz"
    short.write_bytes(gzip.compress(f"{GOOD}\n".encode() * 100)[:40])
    binary = tmp_path / "binary"
    binary.write_bytes(f"{GOOD}\n".encode() + b"\xff\xfe\n")
    for path, message in [
        (tmp_path / "missing", "cannot be read (No such file or directory)"),
        (tmp_path, "cannot be read (Is a directory)"),
        (short, "cannot be read (Compressed file ended before the end-of-stream marker was reached)"),
        (binary, " line 2: it is not UTF-8"),
        (write("", name="empty"), "it is empty"),
    ]:
        with pytest.raises(TraceError) as error:
            read_traces([path])
        assert str(error.value).startswith(f"{path}:")
        assert message in str(error.value)
