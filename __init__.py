"""fxopt: a compiler for PyTorch models. Names are imported when they are first used, so that it starts at once."""

from __future__ import annotations

import importlib
import random
import re
from typing import TYPE_CHECKING

from .collection import collection_paused
from .version import VERSION as __version__

if TYPE_CHECKING:
    from .api import (
        capture,
        element_wise,
        graphs,
        list_passes,
        load_sharded,
        load_state_dict,
        optimize,
        plan,
        refresh,
        report,
        restore,
        state_dict,
        translate_optimizer,
        translate_state,
    )
    from .errors import (
        ArchiveError,
        BudgetError,
        CalibrationError,
        CaptureError,
        EngineWarning,
        FusedMemberError,
        FxoptError,
        GuardError,
        GuardWarning,
        InputError,
        MatchFailure,
        ModeError,
        NothingDoneWarning,
        OrderError,
        PassError,
        PipelineError,
        PlanError,
        StateError,
        StateWarning,
        UnverifiedWarning,
        UsageError,
        VerificationError,
    )
    from .files import export, load, save, save_compact
    from .layers.distributed import OuterSteps, no_sync
    from .operators import OpInfo, register_operator
    from .passes.contract import Pass
    from .passes.pipeline import ending_together
    from .passes.rewriting import Edit, Match, Pattern, anything, either, module, operation
    from .passes.sites import Cause, Goal, Numerics, OwnForward, Phase, Refusal, Site
    from .reporting.exports import to_networkx
    from .reporting.report import Report
    from .runtime.graphs import Context
    from .runtime.record import Decision, Plan
    from .runtime.state import Concatenate, Mask, Rename, Select, Stack, StateStep
    from .runtime.values import leaf
    from .searching import Front, search
    from .tracing.examples import Inputs
    from .tracing.program import Program
    from .tracing.recording import recording
    from .transforms.attention import Attention
    from .transforms.autocast import Autocast
    from .transforms.channels_last import ChannelsLast
    from .transforms.checkpoint import Checkpoint
    from .transforms.ddp import Ddp
    from .transforms.delegate import Delegate
    from .transforms.eliminate_common_subexpressions import EliminateCommonSubexpressions
    from .transforms.eliminate_dead_code import EliminateDeadCode
    from .transforms.flatten_calls import FlattenCalls
    from .transforms.fold_batchnorm import FoldBatchnorm
    from .transforms.fold_constants import FoldConstants
    from .transforms.fsdp import Fsdp
    from .transforms.fuse_ensembles import FuseEnsembles
    from .transforms.fuse_experts import FuseExperts
    from .transforms.graph_pooling import GraphPooling
    from .transforms.pack import Pack
    from .transforms.pipeline import Pipeline
    from .transforms.prune import Prune
    from .transforms.qat import Qat
    from .transforms.quantize import Quantize
    from .transforms.release import Release
    from .transforms.sparse_message_passing import SparseMessagePassing
    from .transforms.swap_kernels import SwapKernels
    from .transforms.sync_batchnorm import SyncBatchnorm
    from .transforms.tensor_parallel import TensorParallel

_PLACES = {
    "api": (
        "capture graphs list_passes load_sharded load_state_dict optimize plan refresh report restore state_dict "
        "element_wise translate_optimizer translate_state"
    ),
    "errors": (
        "ArchiveError BudgetError CalibrationError CaptureError EngineWarning FusedMemberError FxoptError GuardError "
        "GuardWarning InputError MatchFailure ModeError NothingDoneWarning OrderError PassError PipelineError "
        "PlanError StateError StateWarning UnverifiedWarning UsageError VerificationError"
    ),
    "files": "export load save save_compact",
    "layers.distributed": "OuterSteps no_sync",
    "operators": "OpInfo register_operator",
    "passes.contract": "Pass",
    "passes.pipeline": "ending_together",
    "passes.rewriting": "Edit Match Pattern anything either module operation",
    "runtime.record": "Decision Plan",
    "runtime.values": "leaf",
    "runtime.state": "Concatenate Mask Rename Select Stack StateStep",
    "passes.sites": "Cause Goal Numerics OwnForward Phase Refusal Site",
    "reporting.exports": "to_networkx",
    "reporting.report": "Report",
    "tracing.recording": "recording",
    "tracing.examples": "Inputs",
    "runtime.graphs": "Context",
    "tracing.program": "Program",
    "searching": "Front search",
}
_PASSES = (
    "Attention Autocast ChannelsLast Checkpoint Ddp Delegate EliminateCommonSubexpressions EliminateDeadCode "
    "FlattenCalls FoldBatchnorm FoldConstants Fsdp FuseEnsembles FuseExperts GraphPooling Pack Pipeline Prune Qat "
    "Quantize Release SparseMessagePassing SwapKernels SyncBatchnorm TensorParallel"
)
_PLACE_OF = {
    **{name: namespace for namespace, names in _PLACES.items() for name in names.split()},
    **{name: f"transforms.{re.sub('(?<!^)(?=[A-Z])', '_', name).lower()}" for name in _PASSES.split()},
}

__all__ = [
    "ArchiveError", "Attention", "Autocast", "BudgetError", "CalibrationError", "CaptureError", "Cause",
    "ChannelsLast", "Checkpoint", "Concatenate", "Context", "Ddp", "Decision", "Delegate", "Edit",
    "EliminateCommonSubexpressions", "EliminateDeadCode", "EngineWarning", "FlattenCalls", "FoldBatchnorm",
    "FoldConstants", "Front", "Fsdp", "FuseEnsembles", "FuseExperts", "FusedMemberError", "FxoptError", "Goal",
    "GraphPooling", "GuardError", "GuardWarning", "InputError", "Inputs", "Mask", "Match", "MatchFailure", "ModeError",
    "NothingDoneWarning", "Numerics", "OpInfo", "OrderError", "OuterSteps", "OwnForward", "Pack", "Pass", "PassError",
    "Pattern", "Phase", "Pipeline", "PipelineError", "Plan", "PlanError", "Program", "Prune", "Qat", "Quantize",
    "Refusal", "Release", "Rename", "Report", "Select", "Site", "SparseMessagePassing", "Stack", "StateError",
    "StateStep", "StateWarning", "SwapKernels", "SyncBatchnorm", "TensorParallel", "UnverifiedWarning", "UsageError",
    "VerificationError", "__version__", "anything", "capture", "either", "element_wise", "ending_together", "export",
    "graphs", "leaf", "list_passes", "load", "load_sharded", "load_state_dict", "module", "no_sync", "operation",
    "optimize", "plan", "recording", "refresh", "register_operator", "report", "restore", "save", "save_compact",
    "search", "state_dict", "to_networkx", "translate_optimizer", "translate_state",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in ("cuda_ops", "layers"):  # their names are their own: `fxopt.layers.RBM`
        return importlib.import_module(f".{name}", __name__)
    namespace = _PLACE_OF.get(name)
    if namespace is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    state = random.getstate()
    try:
        with collection_paused():  # what is imported lives on
            value = getattr(importlib.import_module(f".{namespace}", __name__), name)
    finally:
        random.setstate(state)  # packages that are imported then draw numbers
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
