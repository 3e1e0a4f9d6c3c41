"""A backend of torch.compile that runs graphs as they are and keeps them: what a CUDA graph can record."""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves


class Graphs:
    """Counts the programs that were compiled, and keeps the graphs of their forward and backward passes."""

    def __init__(self):
        self.programs, self.found = 0, []

    def __call__(self, program, inputs):
        self.programs += 1
        return aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)(program, inputs)

    def _keep(self, graph, inputs):
        self.found.append(graph.graph)
        return make_boxed_func(graph)

    def check(self, number=2):
        """Asserts that no node of so many graphs reads what a tensor holds, or has a size that depends on it."""
        assert len(self.found) == number
        for node in (node for graph in self.found for node in graph.nodes):
            if isinstance(node.target, torch._ops.OpOverload):
                assert torch.Tag.data_dependent_output not in node.target.tags, node
            sizes = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
            assert not any(map(free_unbacked_symbols, sizes)), node
