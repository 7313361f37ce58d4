#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serving measurements of small GLM-5.3-Flash shapes on one H200, in a checkout on a host with stock vLLM.
#
#   benchmarks/measure_h200.sh all   OUT [SECONDS]   every suite with ample KV cache, 500 s
#   benchmarks/measure_h200.sh pair  OUT [SECONDS]   branches and decode, two servers of stock and of ladder, 500 s
#   benchmarks/measure_h200.sh cold  OUT [SECONDS]   cold prompts, two servers of stock, ladder and equal, 400 s
#   benchmarks/measure_h200.sh tight OUT [SECONDS]   conversations with a quarter of it, 330 s
#   benchmarks/measure_h200.sh ranks OUT [SECONDS]   cold prompts and branches on RANKS (2) GPUs, 500 s
#
# All servers share the GPU or GPUs, take turns, and have processors of their own. Samples go to OUT/PART.jsonl as they
# are made, the servers' logs to OUT/logs-*.tgz, and a short table to stdout. What is short of time takes fewer samples.
# DCP (1) of the RANKS share a sequence's attention cache, with the model and the settings that stock then runs.
# SERVE is another command than vllm serve, for a rehearsal; PROCESSORS (3, cold: 2, ranks: RANKS + 3) are each server's
# own, 0 for any.
# CAPTURE, as "4,8,16,32,64,512,1024,2048", are the batches in tokens that every arm captures CUDA graphs for; left out,
# they are vLLM's own choice, which leaves the pass behind a hit to a host that takes longer over it than the GPU.
# LOAD_FORMAT (seeded) is vLLM's; tests/engine/seeded_weights.py says what `seeded` needs. PYTHON (python3) runs it.
set -uo pipefail
part=${1:?all, pair, cold, tight or ranks}
out=${2:?a folder to write to}
case $out in /*) ;; *) out=$PWD/$out ;; esac
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$root VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1 PYTHONUTF8=1

processors=3
mergeable=()
parallel=()
case $part in
all)
    seconds=${3:-500}
    arguments=(--arms "stock,ladder,equal,replay" --suites "cold,branches,branches-room,decode,conversations,growth"
        --only cold=stock,ladder,equal --only branches=stock,ladder,replay --only branches-room=stock,ladder --only decode=stock,ladder
        --only conversations=stock,ladder,replay --only growth=stock,ladder
        --sizes "8192,2048,16384,32768" --samples 30 --turns 60 --traces 2 --growth-sizes "2048,4096,8192,16384,32768,65536")
    memory=$((4 << 30))
    ;;
pair)
    # What a pass or a step costs on the host differs from server to server by more than the targets ask for.
    seconds=${3:-500}
    arguments=(--arms "stock,ladder" --servers 2 --suites "branches,branches-room,decode" --sizes 8192 --samples 30)
    memory=$((4 << 30))
    ;;
cold)
    seconds=${3:-400}
    arguments=(--arms "stock,ladder,equal" --servers 2 --suites cold --sizes "8192,2048,16384" --samples 100)
    memory=$((4 << 30))
    processors=2
    ;;
tight)
    # 224 blocks: a quarter of what 4 GiB hold.
    seconds=${3:-330}
    arguments=(--arms "stock@224,ladder@224,replay@224" --suites conversations --sizes 8192 --turns 60 --traces 3)
    memory=$((2 << 30))
    ;;
ranks)
    seconds=${3:-500}
    arguments=(--arms "stock,ladder,equal" --suites "cold,branches,branches-room" --sizes "8192,16384,32768" --samples 30)
    memory=$((4 << 30))
    ranks=${RANKS:-2} dcp=${DCP:-1}
    case $ranks/$dcp in
    2/[12] | 4/[124]) ;;
    *)
        echo "error: RANKS=$ranks DCP=$dcp: give RANKS 2 with DCP 1 or 2, or RANKS 4 with DCP 1, 2 or 4" >&2
        exit 2
        ;;
    esac
    processors=$((ranks + 3))
    parallel=(--tensor-parallel-size "$ranks")
    if [ "$dcp" -gt 1 ]; then
        mergeable=("$ranks")
        parallel+=(--decode-context-parallel-size "$dcp" --kv-cache-dtype fp8_ds_mla --cp-kv-cache-interleave-size 16)
    fi
    ;;
*)
    echo "error: $part: give all, pair, cold, tight or ranks" >&2
    exit 2
    ;;
esac

scratch=$(mktemp -d)
keep_logs() {
    [ ! -e "$scratch/logs" ] || tar czf "$out/logs-$part.tgz" -C "$scratch" logs
    rm -rf "$scratch"
}
trap keep_logs EXIT
mkdir -p "$out" || exit

"$python" -c 'import pathlib, sys; from tests.engine.glm import mergeable, write_config
folder, *ranks = sys.argv[1:]
write_config(pathlib.Path(folder), **(mergeable(int(*ranks)) if ranks else {}))' "$scratch/glm" "${mergeable[@]}"

"$python" -m vllm_kda_prefill bench ab --model "$scratch/glm" "${arguments[@]}" --keep-going \
    ${SERVE:+--serve "$SERVE"} --processors "${PROCESSORS:-$processors}" \
    --seconds "$seconds" --start-seconds 300 --output "$out/$part.jsonl" --logs "$scratch/logs" -- \
    --skip-tokenizer-init --load-format "${LOAD_FORMAT:-seeded}" --language-model-only \
    "${parallel[@]}" --max-model-len 70000 --max-num-batched-tokens 8192 --max-num-seqs 8 \
    ${CAPTURE:+--compilation-config "{\"cudagraph_capture_sizes\": [$CAPTURE]}"} \
    --gpu-memory-utilization 0.1 --kv-cache-memory-bytes "$memory" \
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'
