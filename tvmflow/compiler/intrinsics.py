"""Tensor intrinsics: what a loop computes, and the instructions that take its place, both in TVM's script."""

from tvm.s_tir import TensorIntrin
from tvm.script import from_source
from tvm.script import tirx as script


def define(name: str, head: str, meaning: str, done: str) -> None:
    """Make an intrinsic known to TVM: a function's head, with the body that it stands for and that which is run."""
    described, implemented = (from_source(head + body, extra_vars={"T": script}) for body in (meaning, done))
    TensorIntrin.register(name, described, implemented, override=True)
