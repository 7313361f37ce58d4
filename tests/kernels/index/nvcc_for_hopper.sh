#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# nvcc as DeepGEMM calls it for SM12x, but for Hopper and with the headers in HOPPER_INCLUDE first.
for argument in "$@"; do
  shift
  case $argument in
    --gpu-architecture=sm_12*) argument=--gpu-architecture=sm_90a ;;
  esac
  set -- "$@" "$argument"
done
case $* in
  *--cubin*) set -- "--include-path=$HOPPER_INCLUDE" "$@" ;;
esac
exec "$REAL_NVCC" "$@"
