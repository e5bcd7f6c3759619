"""The precisions of weights whose passes were measured, with the rates of our kernels for them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The form of the layers' weights; embeddings and output layer stay in bf16.

    The constants were fitted to the published figures of four shapes each (docs/sizing.md).
    """

    name: str
    layer_bytes: int
    """Bytes of a layer's weight."""
    read_rate: float
    """Rate at which layers' weights are read, as a share of that of bf16."""
    decode_flops_per_s: float
    """Rate of the products of decode passes."""
    decode_layer_s: float
    """Time of a layer beside its products: kernels that start and wait."""
    prefill_flops_per_s: float
    """Rate of the products of prompts."""
    prefill_layer_s: float
    """Least time of a layer of a prompt: its kernels start one after another."""
    element_s: float
    """Time of an element that norms, rotations, activations and quantisation read and write in a prompt's pass."""


BF16 = Precision(
    name="bf16",
    layer_bytes=2,
    read_rate=1.0,
    decode_flops_per_s=851e12,
    decode_layer_s=14.6e-6,
    prefill_flops_per_s=743e12,
    prefill_layer_s=62e-6,
    element_s=0.723e-12,
)
FP8 = Precision(
    name="fp8",
    layer_bytes=1,
    read_rate=0.874,
    decode_flops_per_s=1200e12,
    decode_layer_s=22e-6,
    prefill_flops_per_s=1350e12,
    prefill_layer_s=80e-6,
    element_s=1.1e-12,
)
PRECISIONS = {precision.name: precision for precision in (BF16, FP8)}
