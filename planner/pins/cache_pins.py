"""What is pinned for embedding tables: how many of their rows are on the device:
`parameters tables.* cache=1.5%`, or `cache=200MB`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import cast

from meshwright.forms.storage import facts_of_store, of_tables
from meshwright.forms.sync import chosen, facts_of_tables, takes_rows, zero_of_tables
from meshwright.forms.sync_findings import of_stage
from meshwright.forms.tables import table_findings
from meshwright.ir.cluster.device import parse_quantity
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.graph.tables import EmbeddingTable, tables_of
from meshwright.ir.plan.parameters import as_for, choice_of
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Setting, Stage, Zero
from meshwright.ir.text.units import size
from meshwright.planner.pins.parameter_pins import ParametersAs, paths_of

KEY = "cache"
_ROUNDED = 1e-6
"""Of a row: shares are written in some digits."""


@dataclass(frozen=True, slots=True)
class TablesCached(ParametersAs):
    """Tables whose module paths match are in a store that keeps rows, with so many slots: a share
    of the rows, or bytes of values, which are then the same share of all of them."""

    @property
    def choice(self) -> ParameterChoice:
        """Nothing is said that is the same for all of them."""
        return ParameterChoice()

    @property
    def _size(self) -> str:
        return dict(self.said)[KEY]

    def apply(self, graph: Graph, blocks: Sequence[Block], stage: Stage) -> Stage:
        """Returns a stage that runs these blocks with caches for such tables, where they go with
        what else it does."""
        known = paths_of(graph, blocks)
        for table in self.tables(graph):
            choice = self._of(graph, stage, table)
            fits = choice is not None and not any(of_stage(as_for(stage, choice), ""))
            if table.path in known and choice is not None and fits:
                stage = replace(stage, by_parameter={**stage.by_parameter, table.path: choice})
        return stage

    def holds(self, plan: Plan, graph: Graph) -> bool:
        """Whether a plan keeps it."""
        ratio = self._ratio(graph)
        for index, stage in enumerate(plan.stages):
            known = paths_of(graph, plan.stage_blocks(graph, index))
            for table in self.tables(graph):
                choice = choice_of(stage.by_parameter, table.path)
                store = choice.store if choice else None
                if table.path in known and not (
                    store and store.form in of_tables() and store.settings.get("ratio") == ratio
                ):
                    return False
        return not any(table_findings(plan, graph))

    def check(self, graph: Graph) -> None:
        """PlanError if it names no table that may have a cache, or no size."""
        if not self.tables(graph):
            known = [table.path for table in tables_of(graph) if table.ids]
            near = nearest(self.pattern, known)
            has = f"nearest is {near!r}" if near else "the model has none"
            raise PlanError(f"constraint '{self}': no such table whose rows an input names; {has}")
        self._check_row(graph)

    def tables(self, graph: Graph) -> list[EmbeddingTable]:
        """Returns the tables that it names, of those whose rows an input names."""
        known = {table.path: table for table in tables_of(graph) if table.ids}
        return [known[path] for path in self.named(known)]

    def _check_row(self, graph: Graph) -> None:
        """PlanError if none of the tables gets a row of it; a small one beside others gets one."""
        ratio, tables = self._ratio(graph), self.tables(graph)
        largest = max(tables, key=lambda table: table.rows)
        if ratio * largest.rows >= 1 - _ROUNDED:
            return
        least = f"{100 / largest.rows:.9g}%"
        if not self._size.endswith("%"):
            least = f"{ceil(sum([t.rows * t.row_bytes for t in tables]) / largest.rows)}B"
        raise PlanError(
            f"constraint '{self}': a cache has one row at least, and {self._size} is less than one "
            f"of the {largest.rows:,} rows of {largest.path!r}; nearest is cache={least}"
        )

    def _ratio(self, graph: Graph) -> float:
        text = self._size
        wrong = PlanError(
            f"constraint '{self}': cache is a share of rows from 0 to 100 %, or bytes: cache=1.5%, "
            "cache=200MB"
        )
        if text.endswith("%"):
            try:
                found = float(text[:-1]) / 100
            except ValueError:
                raise wrong from None
        else:
            nbytes = parse_quantity(text, "bytes")
            if not isinstance(nbytes, int | float):
                raise wrong
            every = sum(table.rows * table.row_bytes for table in self.tables(graph))
            if nbytes > every:
                raise PlanError(
                    f"constraint '{self}': the tables have {size(every)} in all, less than that; "
                    "nearest is cache=100%"
                )
            found = float(nbytes) / every
        if not 1e-9 <= found <= 1:
            raise wrong
        return found

    def _of(self, graph: Graph, stage: Stage, table: EmbeddingTable) -> ParameterChoice | None:
        """What is said of a table. As long as nobody has counted, all look-ups are taken to be of
        rows of their own that are in no slot (`planner.finishing.cached_tables`)."""
        most = max(stage.batch_shares, default=1) / max(1, sum(stage.batch_shares))
        every = min(1.0, table.lookups / table.rows)
        each = min(1.0, ceil(table.lookups * most) / table.rows)
        facts: Mapping[str, Setting] = {
            "ratio": self._ratio(graph), "rows": every, "rows_each": each, "missing": every,
            "row_bytes": table.row_bytes, "busiest": 1.0, "ids": table.ids,
        }  # fmt: skip
        store = of_tables()[0]
        told = FormChoice(form=store, settings={n: facts[n] for n in facts_of_store(store)})
        if stage.dp == 1:
            return ParameterChoice(store=told)
        for form in chosen():
            wanted = facts_of_tables(form)
            if takes_rows(form) and set(wanted) <= set(facts):
                sync = FormChoice(form=form, settings={name: facts[name] for name in wanted})
                zero = cast(Zero, zero_of_tables(form))
                return ParameterChoice(zero=zero, sync=sync, store=told)
        return None
