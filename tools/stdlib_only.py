"""A contract for import-linter: some modules import nothing but the standard library, and each other.

An allow-list, where import-linter's own `forbidden` contract would need the name of every package there is.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class StdlibOnlyContract(Contract):
    """`modules` import each other, the standard library and `may_import`; inside functions also `lazily`."""

    # import-linter replaces each field by the list that the settings give.
    modules: Any = fields.ListField(subfield=fields.StringField())
    may_import: Any = fields.ListField(subfield=fields.StringField(), required=False, default=[])
    lazily: Any = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        inside = {member for name in self.modules for member in (name, *graph.find_descendants(name))}
        may_import = {member for name in self.may_import for member in (name, *graph.find_descendants(name))}
        # Importing a.b runs a, so the packages that hold the modules are among them.
        allowed = {*inside, *(name.rpartition(".")[0] for name in inside), *may_import}
        bad = []
        for importer in sorted(inside):
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                if imported in allowed or imported.partition(".")[0] in sys.stdlib_module_names:
                    continue
                for detail in graph.get_import_details(importer=importer, imported=imported):
                    is_lazy = is_indented(importer, detail["line_number"])
                    if not is_lazy or imported not in self.lazily:
                        bad.append((importer, imported, detail["line_number"], is_lazy))
        return ContractCheck(kept=not bad, metadata={"bad": bad})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported, line_number, is_lazy in check.metadata["bad"]:
            where = "inside a function" if is_lazy else "at its top"
            output.print_error(f"{importer}:{line_number} imports {imported} {where}", bold=False)


def is_indented(module: str, line_number: int) -> bool:
    """Whether an import stands inside a function; the graph itself does not keep the indentation."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    return Path(spec.origin).read_text("utf-8").splitlines()[line_number - 1][:1].isspace()
