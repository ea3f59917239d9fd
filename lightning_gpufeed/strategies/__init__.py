"""Strategies for a Trainer; each says when, the engines below know how."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gpufeed.strategies.out_of_order import OutOfOrderStrategy

__all__ = ["OutOfOrderStrategy"]

for _name, _find_unused in (("out_of_order", False), ("out_of_order_find_unused_parameters_true", True)):
    StrategyRegistry.register(
        _name,
        OutOfOrderStrategy,
        description="Data parallel with out-of-order gradient sync",
        override=True,  # the module may be imported anew
        find_unused_parameters=_find_unused,
    )
