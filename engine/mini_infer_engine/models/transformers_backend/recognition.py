"""Recognises modules of transformers whose code is that of Llama's layer, whatever their class is called.

Code is compared, not names: the syntax trees of the methods, without annotations and comments, must be those of the
library's own Llama or Qwen3. Most families of decoders are copies of those. It replaces nothing.
"""

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """The modules of a decoder layer, each of which computes what Llama's does."""

    layer: nn.Module
    attention: Any
    mlp: Any
    input_norm: Any
    attention_norm: Any
    """The norm after attention."""
    has_head_norms: bool
    """True if heads of queries and keys are normalised, as in Qwen3."""


class _Plain(ast.NodeTransformer):
    """Removes what does not matter: annotations, and the options of the attention call, which `probe` reads."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Returns the assignment without its annotation."""
        return ast.Assign(targets=[node.target], value=self.visit(node.value)) if node.value is not None else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Returns the call, that of attention without options."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "attention_interface":
            node.keywords = []
        return node


def _tree(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Returns the syntax tree of a function, or None if its source is not there."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        [tree] = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


@cache
def _code(function: Callable[..., Any]) -> str | None:
    """Returns the syntax tree of a function's body as text, or None if its source is not there."""
    tree = _tree(function)
    if tree is None:
        return None
    has_docstring = ast.get_docstring(tree) is not None
    names = [argument.arg for argument in tree.args.args]
    body = [_Plain().visit(statement) for statement in tree.body[1 if has_docstring else 0 :]]
    return f"{names[:2]} {ast.dump(ast.Module(body, []))}"


@cache
def _llama() -> Any:
    return importlib.import_module("transformers.models.llama.modeling_llama")


@cache
def _qwen3() -> Any:
    return importlib.import_module("transformers.models.qwen3.modeling_qwen3")


def _computes_like(module: nn.Module, reference: type[nn.Module]) -> bool:
    """True if a module's forward is the code of the reference, and nothing has replaced or hooked it."""
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    code = _code(type(module).forward)
    return code is not None and code == _code(reference.forward)


def only_passes_states_on(backbone: nn.Module) -> bool:
    """True if a decoder's layers are one loop that hands each layer's output to the next, and keeps none of them.

    Layers may then add to their input in place.
    """
    tree = _tree(type(backbone).forward)
    loops = [] if tree is None else [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    if tree is None or len(loops) != 1 or loops[0] not in tree.body:
        return False
    match loops[0].body:
        case [ast.Assign(targets=[ast.Name(id=made)], value=ast.Call(args=[ast.Name(id=read), *_]))] if made == read:
            after = tree.body[tree.body.index(loops[0]) + 1 :]
            names = {node.id for statement in after for node in ast.walk(statement) if isinstance(node, ast.Name)}
            return "inputs_embeds" not in names
        case _:
            return False


def is_llama_norm(module: nn.Module) -> bool:
    """True if the module is an RMS norm as Llama's."""
    has_parts = isinstance(getattr(module, "variance_epsilon", None), float) and hasattr(module, "weight")
    return has_parts and _computes_like(module, _llama().LlamaRMSNorm)


def is_llama_mlp(module: Any) -> bool:
    """True if the module is a SwiGLU block as Llama's."""
    if not _computes_like(module, _llama().LlamaMLP):
        return False
    return _are_siblings(module.gate_proj, module.up_proj) and _is_linear(module.down_proj) and _is_silu(module.act_fn)


def llama_layer(layer: Any) -> LlamaLayer | None:
    """Returns the parts of a decoder layer as Llama's or Qwen3's; None if any of them has other code."""
    if not _computes_like(layer, _llama().LlamaDecoderLayer):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    has_head_norms = _computes_like(attention, _qwen3().Qwen3Attention)
    if not has_head_norms and not _computes_like(attention, _llama().LlamaAttention):
        return None
    if has_head_norms and not (is_llama_norm(attention.q_norm) and is_llama_norm(attention.k_norm)):
        return None
    rotates_alike = all(
        _code(getattr(sys.modules[type(attention).__module__], name, _code)) == _code(getattr(_llama(), name))
        for name in ("apply_rotary_pos_emb", "rotate_half")
    )
    projects = _are_siblings(attention.q_proj, attention.k_proj, attention.v_proj) and _is_linear(attention.o_proj)
    norms = layer.input_layernorm, layer.post_attention_layernorm
    has_one_dtype = len({parameter.dtype for parameter in layer.parameters()}) == 1
    if (
        not rotates_alike
        or not projects
        or not has_one_dtype
        or not is_llama_mlp(mlp)
        or not all(map(is_llama_norm, norms))
    ):
        return None
    return LlamaLayer(layer, attention, mlp, *norms, has_head_norms)


def _is_linear(module: object) -> bool:
    return type(module) is nn.Linear and "forward" not in vars(module)


def _are_siblings(*layers: Any) -> bool:
    """True if linear layers of one input can be one product: all have biases, or none."""
    if not all(map(_is_linear, layers)):
        return False
    return len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) == 1


@cache
def _samples() -> Tensor:
    return torch.linspace(-6, 6, 49, device="cpu")


def _is_silu(activation: Any) -> bool:
    made = activation(_samples())
    return isinstance(made, Tensor) and torch.equal(made, functional.silu(_samples()))
