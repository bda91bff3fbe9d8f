"""The part of an edit that is about the module tree: children, tensors, attributes, and how state follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...compat import children_of, has_hooks, own_buffers, own_children, own_parameters, own_tensor, submodule
from ...errors import MatchFailure, PassError, expect
from ...runtime.graphs import (
    Region,
    add_region,
    capture_of,
    drop_specializations,
    install,
    note_added,
    note_removed,
    own,
    recompile,
    remove_region,
    specializations_of,
)
from ...runtime.guards import Guard, Source, attribute_at, exactly
from ...runtime.state import Holder, StateMap, StateStep, add_child
from ...runtime.values import Absent, counts_items, qualified
from ...tracing.program import Program, changed_metas
from ...tracing.reads import OWN_CHILDREN
from ..sites import Site
from .graph_edit import GraphEdit
from .snapshot import Snapshot

__all__ = ["TreeEdit"]


class TreeEdit(GraphEdit):
    """Change the modules around one site: their graphs, children, attributes and tensors."""

    def __init__(self, program: Program, site: Site, pass_name: str, snapshot: Snapshot | None = None) -> None:
        super().__init__(program, site, pass_name, snapshot)
        self._steps: list[tuple[Site, StateStep]] = []
        self._ties: list[tuple[str, str]] = []
        self._attributes: dict[tuple[nn.Module, str], tuple[str, ...]] = {}
        self._removed: set[tuple[nn.Module, str]] = set()
        self._others: list[object] = []

    # -- children --------------------------------------------------------------------------------------------------

    def add_module(self, module: nn.Module, *, name: str) -> str:
        """Register `module` as a child of the owner as `name`, or `name_1`, ... if that is taken; return the name.

        It becomes no item of an `nn.Sequential` or another container: graphs alone call it.

        Raises:
            MatchFailure: if the owner's forward goes through all its children, and would come across this one.
        """
        expect(module, nn.Module, "module", "the torch.nn.Module to add")
        self._check_takes_more(self.owner, name)
        free = self._free_name(name)
        module.train(self.owner.training)
        self._set(free, module)
        self._set_apart(self.owner, free)
        return free

    def add_owned(self, module: nn.Module, *, name: str) -> str:
        """Register `module`, which holds tensors, as a child of the site's holder; return its name.

        What runs under a context borrows it under the same name; elsewhere the owner itself is the holder.
        """
        holders = self.holder.borrowers_and_holder
        self._check_takes_more(self.holder.module, name)
        free = self._free_name(name, *holders)
        module.train(self.holder.module.training)
        with self._journal.changing(*holders):
            self.holder.share(free, module)
        self._set_apart(self.holder.module, free)
        self.program.touch()
        return free

    def _check_takes_more(self, holder: nn.Module, name: str) -> None:
        """Make sure that nobody who goes through the children of a module comes across a new one."""
        specializations = () if counts_items(type(holder)) else specializations_of(holder)
        guards = (guard for each in specializations for guard in each.guards)
        if any(OWN_CHILDREN in guard.sources() for guard in guards):
            raise MatchFailure(
                f"the forward of '{self.site.owner or '(root)'}' goes through all its children, and would come across "
                f"'{name}'; rewrite within its children, or replace one by edit.replace_module"
            )

    def _set_apart(self, holder: nn.Module, child: str) -> None:
        """Keep a new child from being an item of a container, unless it has the name of one that was taken out."""
        if counts_items(type(holder)) and (holder, child) not in self._removed:
            note_added(holder, child)

    def add_region(self, region: Region, *, name: str) -> str:
        """Give the owner a region, called `name`, or `name_1`, ... if that is taken; return the name."""
        free = self._free_name(name)
        with self._journal.changing(self.owner):
            add_region(self.owner, free, region)
        self.program.touch()
        return free

    def remove_region(self, name: str) -> None:
        """Take the region `name` from the owner; nothing may call it any more."""
        with self._journal.changing(self.owner):
            remove_region(self.owner, name)
        self.program.touch()

    def remove_module(self, name: str) -> None:
        """Take the child `name` out of the owner; nothing may call it any more."""
        with self._journal.changing(self.owner):
            delattr(self.owner, name)
            if not note_removed(self.owner, name):
                self._removed.add((self.owner, name))
        self.program.touch()

    def replace_module(self, at: str | fx.Node, module: nn.Module) -> None:
        """Put a module in the place of another: same name, same place in the order of its siblings.

        Where the old one has several names, the new one has them all. Its parameters and buffers are those of the
        same names, unless `record_state` says otherwise.

        Args:
            at: the old module's name, qualified from the owner ("" is the owner itself), or a node that calls it.
            module: the new one; it takes over the mode. If it is in the model already, it then has two names.

        Raises:
            MatchFailure: if the old one has hooks, is the whole model, or has a name outside the site, too.
            UsageError: `module` is none.
        """
        expect(module, nn.Module, "module", "the torch.nn.Module to put there")
        name = self._path(at if isinstance(at, str) else str(at.target))
        old = self.program.module(name)
        if not name:
            raise MatchFailure("the whole model cannot be replaced; replace what is in it")
        if has_hooks(old):
            raise MatchFailure(f"'{name}' has hooks, which the module in its place would not have")
        module.train(old.training)
        if old in self.program.exact_types:
            raise MatchFailure(self.program.exact_types[old])
        for holder, last in self._places(old, name, "is also called").values():
            with self._journal.changing(holder):
                own_children(holder).update({last: module})  # fused members refuse items
        self._others.append(module)
        for known in (self._owners, self._holders):
            known.clear()
            self._journal.note(known.clear)
        self.program.touch()

    @property
    def _prefix(self) -> str:
        """Return what the names begin with of all that is within the site; a region's is what is around it."""
        name = self._whole.owner
        while isinstance(self.program.module(name), Region):
            name = name.rpartition(".")[0]
        return f"{name}." if name else ""

    def _places(self, wanted: object, name: str, how: str) -> dict[str, tuple[nn.Module, str]]:
        """Return each name of a tensor or module -> whose it is, and its name there; all must be within the site."""
        found: dict[str, tuple[nn.Module, str]] = {}
        for holder, path in _all_names(self.program.model):
            children = {} if isinstance(holder, Region) else own_children(holder)
            for last, value in (*own_parameters(holder).items(), *own_buffers(holder).items(), *children.items()):
                if value is wanted:
                    found[qualified(path, last)] = holder, last
        prefix = self._prefix
        outside = next((other for other in found if not f"{other}.".startswith(prefix)), None)
        if outside is not None:
            raise MatchFailure(f"'{name}' {how} '{outside}', outside the site; make it a part of the site")
        return found

    # -- tensors and attributes ------------------------------------------------------------------------------------

    def set_tensor(self, path: str, tensor: Tensor, step: StateStep | None) -> None:
        """Put another tensor in the place of a parameter or buffer.

        Args:
            path: its name, qualified from the owner; a tied tensor changes under all its names.
            tensor: the new one; of a parameter its values, `requires_grad` stays as it is.
            step: how it comes from the tensors that were there, in names qualified from the owner; None where nothing
                is saved of it.

        Raises:
            MatchFailure: there is none, it has a name outside the site, or the step's two sides cannot be told apart.
        """
        parent, _, last = path.rpartition(".")
        module = self.program.module(self._path(parent))
        old = own_tensor(module, last)
        if old is None:
            raise MatchFailure(f"'{self._path(path)}' is no parameter or buffer")
        is_ambiguous = step is not None and not step.idempotent and path in step.sources and path in step.targets
        if is_ambiguous and old.shape == tensor.shape:
            raise MatchFailure(
                f"'{self._path(path)}' would keep its name and its shape {list(old.shape)} but not its values, so that "
                "checkpoints from before and after could not be told apart; give the new tensor another name"
            )
        new = tensor.detach()
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, old.requires_grad and (new.is_floating_point() or new.is_complex()))
        places = self._places(old, self._path(path), "is tied to")
        first, *others = places
        self._ties += [(name, first) for name in others]
        for holder, name in places.values():
            registry: dict[str, Any] = own_parameters(holder) if name in own_parameters(holder) else own_buffers(holder)
            with self._journal.changing(holder):
                registry[name] = new
        self._others.append(new)
        if step is not None:
            self._record_of_model(step.renamed(lambda name: first if name == path else self._path(name)))
        self.program.touch()

    def _record_of_model(self, step: StateStep) -> None:
        """Say what the rewrite does to tensors by the names that the model has for them."""
        inside = len(self._whole.owner) + 1 if self._whole.owner else 0
        with self.at(self._whole):
            self.record_state(step.renamed(lambda name: name[inside:]))

    def set_attribute(self, path: str, name: str, value: Any) -> None:
        """Give a module's attribute another value (`out_features`, `num_heads`).

        Graphs that this edit rewrites follow: where they hold for the old value only, they now hold for the new one.
        Others that were made for the old value are dropped: the original forward runs.

        Args:
            path: of the module, qualified from the owner; "" is the owner itself.
            name: of a plain attribute that is there.
            value: the new one.

        Raises:
            MatchFailure: if it is none, or holds a tensor or a module.
        """
        module, where = self.program.module(self._path(path)), qualified(self._path(path), name)
        old = getattr(module, name, Absent)
        if old is Absent:
            raise MatchFailure(f"'{where}' does not exist; set an attribute that the module has")
        if isinstance(old, (Tensor, nn.Module)) or isinstance(value, (Tensor, nn.Module)):
            raise MatchFailure(f"'{where}' is a tensor or a module; use set_tensor or replace_module")
        with self._journal.changing(module):
            object.__setattr__(module, name, value)  # the module's own way would drop graphs
        names = (path for found, path in _all_names(self.program.model) if found is module)
        self._attributes[module, name] = tuple(qualified(path, name) for path in names)
        self.program.touch()

    def add_constant(self, value: torch.Tensor, *, name: str) -> str:
        """Keep a constant tensor on the owner; return its name.

        It is a plain attribute, not a buffer: like the literal it replaces, it follows neither `.to()` nor `.half()`,
        and is not part of the state dict.
        """
        free = self._free_name(name)
        self._set(free, value)
        return free

    def adopt(self, target: str, value: Any) -> None:
        """Take over a module or tensor that a function made; a tensor as a buffer that no state dict holds."""
        path, _, name = target.rpartition(".")
        holder = self.owner.get_submodule(path)
        with self._journal.changing(holder):
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                holder.register_buffer(name, value, persistent=False)
            else:
                setattr(holder, name, value)
        self.program.touch()

    def _free_name(self, name: str, *holders: nn.Module) -> str:
        free, number = name, 0
        while any(hasattr(holder, free) for holder in holders or (self.owner,)):
            number += 1
            free = f"{name}_{number}"
        return free

    def _set(self, name: str, value: Any) -> None:
        with self._journal.changing(self.owner):
            (add_child if isinstance(value, nn.Module) else setattr)(self.owner, name, value)
        self.program.touch()

    def _path(self, name: str) -> str:
        """Return the name that the model has for what the owner calls `name`."""
        return qualified(self.site.owner, name) if name else self.site.owner

    # -- state -----------------------------------------------------------------------------------------------------

    def record_state(self, step: StateStep) -> None:
        """Say what the rewrite does to tensors; names are qualified from the owner module.

        Raises:
            MatchFailure: in a region that a pass made, which owns none.
            PassError: the step has no sources or no targets; a tensor cannot be dropped, since old checkpoints have it.
        """
        if not step.sources or not step.targets:
            what = "makes tensors from nothing" if step.targets else "drops what it takes"
            raise PassError(f"the step '{step.kind}' {what}; give it at least one old name and one new name")
        if isinstance(self.holder.module, Region):
            raise MatchFailure(f"'{self.site.owner}' is a region, whose tensors belong to the module around it")
        self._steps.append((self.site, step))

    def state_map(self) -> StateMap:
        """Return the rewrite's effect on names and tensors, from the point of view of the whole site's owner."""
        whole = self._whole.owner
        inside = len(whole) + 1 if whole else 0

        def relative(site: Site, step: StateStep) -> StateStep:
            if site.owner == whole:
                return step
            holder = self._holder_of(site)
            return step.renamed(lambda name: holder.qualified(name)[inside:])

        steps = tuple(relative(site, step) for site, step in self._steps)
        return StateMap(steps, tuple((alias[inside:], name[inside:]) for alias, name in self._ties))

    def state_map_of_model(self) -> StateMap:
        """Return the rewrite's effect by the names that the model's state dict has, where no region is named."""
        steps = tuple(step.renamed(self._holder_of(site).qualified) for site, step in self._steps)
        return StateMap(steps, tuple(self._ties))

    def _holder_of(self, site: Site) -> Holder:
        with self.at(site):
            return self.holder

    @property
    def attributes(self) -> frozenset[str]:
        """Return the qualified names of the attributes that were set."""
        return frozenset(name for names in self._attributes.values() for name in names)

    # -- landing ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check the new graphs and compile them; graphs that were made for attributes that were set follow or go.
        Nodes behind tensors and children that are others say what they give now (`node.meta["val"]`).
        """
        super().finish()
        for module, name in self._attributes:
            for owner, path in _modules_around(self.program.model, module):
                self._follow_attribute(owner, qualified(path, name), getattr(module, name))
        if self._others:
            for module, metas in changed_metas(self.program.module(self._whole.owner), self._others).items():
                self._set_metas(module, metas)
            self._others.clear()
            self.program.touch()

    def _follow_attribute(self, owner: nn.Module, path: str, value: Any) -> None:
        """Let a module's graphs hold for the new value of an attribute, called `path` there, or drop them."""
        capture = capture_of(owner)
        if capture is None:
            return
        expected = {guard.source: guard for guard in exactly(attribute_at(path), value)}
        if any(graphs.module is owner for graphs in self._graphs.values()):
            mine = own(owner).specializations
            for number, each in enumerate(mine):
                guards = tuple(_followed(guard, owner, expected) for guard in each.guards)
                mine[number] = dataclasses.replace(each, guards=guards)
            recompile(owner)
        elif "." not in path and path in capture.reads:
            before = capture
            self._journal.note(lambda: install(owner, before))
            drop_specializations(owner, lambda each: path in each.reads, f"{self.pass_name} set '{path}'")
            self._journal.accept(owner)
        self.program.touch()

    def undo(self) -> None:
        """Put everything back, last change first."""
        super().undo()
        self._steps.clear()
        self._ties.clear()
        self._attributes.clear()
        self._removed.clear()
        self._others.clear()


def _followed(guard: Guard, owner: nn.Module, expected: Mapping[Source, Guard]) -> Guard:
    """Return the guard that holds for the new value in the place of one on the old value, or on its text."""
    new = expected.get(guard.source)
    return guard if new is None or guard.holds({"self": owner}) else new


def _all_names(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield every module of a model with each of its names; regions only borrow what they hold, but for regions."""
    pending: list[tuple[nn.Module, str]] = [(model, "")]
    while pending:
        module, path = pending.pop()
        yield module, path
        named = reversed(children_of(module).items())
        children = [(child, qualified(path, name)) for name, child in named if child is not None]
        pending += [each for each in children if isinstance(each[0], Region) or not isinstance(module, Region)]


def _modules_around(model: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield each module that has `module` inside, or is it, with the name of it there."""
    for found, path in list(_all_names(model)):
        if found is module:
            parts = path.split(".") if path else []
            for count in range(len(parts) + 1):
                around = submodule(model, ".".join(parts[:count]))
                if around is not None:
                    yield around, ".".join(parts[count:])
