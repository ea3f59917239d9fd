"""Strategies for a Trainer; each says when, the engines below know how."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gpufeed.strategies.out_of_order import OutOfOrderStrategy

__all__ = ["OutOfOrderStrategy"]

for _launched, _start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
    for _unused, _find_unused in (("", False), ("_find_unused_parameters_true", True)):
        StrategyRegistry.register(
            f"out_of_order{_launched}{_unused}",
            OutOfOrderStrategy,
            description="Data parallel with out-of-order gradient sync",
            override=True,  # the module may be imported anew
            find_unused_parameters=_find_unused,
            start_method=_start_method,
        )
