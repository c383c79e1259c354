"""Custom autograd.Functions, each of which a trace makes an operator (`ir.trace.functions`): what
is said of all in whose forward torch sees matrix products. They are counted by running it, and
under autocast they are what torch makes of products."""

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.op_facts import OpFacts

PLAIN, WITH_PRODUCTS = "meshwright_function", "meshwright_function_of_products"
"""Namespaces of their operators."""


FACTS = {f"{WITH_PRODUCTS}.*": OpFacts(op_class=OpClass.MATMUL, counted_by_running=True)}
