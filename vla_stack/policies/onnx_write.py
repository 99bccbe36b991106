"""Files of ONNX graphs: traced by torch, weights in as few bytes as they need, in 8 bits where that is asked for.

Weights that are float16 in the policy's file are so in the graph's, and become float32 as it is loaded. In 8 bits,
matrices are int8, one scale an output, and what they are multiplied with becomes uint8 as it comes, one scale a tensor;
convolutions and the matrices of actions stay as they are.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vla_stack.errors import UserError, first_line

SMALLEST_HALVED = 1 << 10  # values
SMALLEST_INT8 = 16  # rows and columns of a matrix: those of actions have fewer, and are read and written exactly
LARGEST_INLINE = 1 << 30  # bytes of weights inside a graph file, else in one beside it; protobuf ends at 2 GiB
REMEDY = "serve it with --backend torch or compile"


class Graph(NamedTuple):
    """What is traced: a module, tensors of an example, what goes in and comes out is called, and the axis of its
    inputs that has any size, up to ``most`` where there is an end."""

    module: nn.Module
    tensors: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    axis: int = 0
    most: int | None = None


def trace(
    module: nn.Module, tensors: tuple[Tensor, ...], axis: int = 0, most: int | None = None
) -> torch.export.ExportedProgram:
    """A module as a graph whose batch, or another axis, has any size. ``torch.onnx.export`` alone would, where that is
    impossible, try other ways of tracing until one of them takes the batch of the example for the only one."""
    batch = {axis: torch.export.Dim("any", max=most)}
    variadic = module.forward.__code__.co_argcount - 1  # *args are one entry of the shapes' tree
    fixed, rest = tensors[:variadic], tensors[variadic:]
    shapes = (*(batch for _ in fixed), tuple(batch for _ in rest))
    return torch.export.export(module.eval(), tensors, dynamic_shapes=shapes, strict=False)


def write(graph: Graph, file: Path, int8: bool = False) -> None:
    """Write a graph.

    Args:
        graph: What.
        file: Where to.
        int8: With products of matrices in 8 bits.

    Raises:
        UserError: It cannot be traced.
    """
    size = sum(p.numel() * p.element_size() for p in graph.module.parameters())
    inline = size <= LARGEST_INLINE
    try:
        logging.getLogger("onnxscript").setLevel(logging.ERROR)  # what it warns of is about its internals
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                trace(graph.module, graph.tensors, graph.axis, graph.most),
                f=file,
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamo=True,
                external_data=not inline,
                verbose=False,
            )
    except Exception as e:  # a tracer's exceptions have no common class
        raise UserError(f"{file.name} cannot be made of this policy: {first_line(e)}", REMEDY) from e
    if int8:
        quantize(file, external=not inline)
    if inline:
        halve(file)


def quantize(file: Path, external: bool) -> None:
    """Let a graph multiply with its matrices in 8 bits, as ONNX Runtime's dynamic quantization does it; ``external``
    weights lie beside the graph."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(file)
    del model.graph.value_info[:]  # shapes that the traced graph had before its constants were transposed
    sizes = {constant.name: tuple(constant.dims) for constant in model.graph.initializer}
    products = [n for n in model.graph.node if n.op_type == "MatMul"]
    kept = [n.name for n in products if min(sizes.get(n.input[1], (0,))) < SMALLEST_INT8]
    kind = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    logging.disable(logging.WARNING)  # it advises other steps before
    try:
        quantize_dynamic(
            model,
            file,
            ["MatMul"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=kept,
            use_external_data_format=external,
            extra_options=kind,
        )
    finally:
        logging.disable(logging.NOTSET)


def shrink(file: Path) -> None:
    """Store a graph's matrices as int8, with one float32 a row of a table or a column of a product. What is computed is
    float32 all the same, alike on every machine: products are cast back as the graph is loaded, rows as they are read.
    """
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(file)
    graph = model.graph
    readers = {c.name: [n for n in graph.node if c.name in n.input] for c in graph.initializer}
    before: list[onnx.NodeProto] = []
    nodes = list(graph.node)
    for constant in list(graph.initializer):
        values, name, of = numpy_helper.to_array(constant), constant.name, readers[constant.name]
        if values.dtype != np.float32 or values.ndim != 2 or values.size < SMALLEST_HALVED:
            continue
        table = all(n.op_type == "Gather" for n in of)
        scale = np.maximum(np.abs(values).max(1 if table else 0, keepdims=True), 1e-12).astype(np.float32) / 127
        constant.CopyFrom(numpy_helper.from_array(np.rint(values / scale).astype(np.int8), f"{name}.int8"))
        graph.initializer.append(numpy_helper.from_array(scale, f"{name}.scale"))
        parts = (f"{name}.int8", f"{name}.scale")
        if not table:
            before += _scaled(parts, name)
            continue
        for reader in of:
            out, ids, at = reader.output[0], reader.input[1], nodes.index(reader)
            read = [
                helper.make_node("Gather", [part, ids], [f"{part}.{out}"], f"{part}.{out}", axis=0) for part in parts
            ]
            nodes[at : at + 1] = [*read, *_scaled((f"{parts[0]}.{out}", f"{parts[1]}.{out}"), out)]
    del graph.node[:]
    del graph.value_info[:]
    graph.node.extend([*before, *nodes])
    onnx.save(model, file)


def _scaled(parts: tuple[str, str], name: str) -> list[Any]:
    """Nodes that make ``name`` of int8 and what each is multiplied with."""
    from onnx import TensorProto, helper

    cast = helper.make_node("Cast", [parts[0]], [f"{name}.float"], f"{name}.cast", to=TensorProto.FLOAT)
    return [cast, helper.make_node("Mul", [f"{name}.float", parts[1]], [name], f"{name}.scaled")]


def halve(file: Path) -> None:
    """Store as float16 the constants of a graph that lose nothing by it; each is cast where it is read, which ONNX
    Runtime does once, as it loads.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(file)
    casts = []
    for constant in model.graph.initializer:
        if constant.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(constant)
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if values.size < SMALLEST_HALVED or not np.array_equal(halves.astype(np.float32), values):
            continue
        name = constant.name
        constant.CopyFrom(numpy_helper.from_array(halves, f"{name}.half"))
        casts.append(helper.make_node("Cast", [f"{name}.half"], [name], f"{name}.cast", to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, file)
