"""The text of scripts that show a failure again: of a pass that raised, and of a model that `reduce` shrank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["BY_REDUCE", "script_text"]

BY_REDUCE = "Made by fxopt reduce."
"""Tells that a script was written by `reduce`."""

_SCRIPT = '''\
"""{summary}

{made} `fxopt repro FILE`, or `python FILE`, runs it: it raises as long as this fails.
"""

{imports}

{definitions}


def main():
    model = build()
    fast = fxopt.optimize(model, PASSES, example_inputs=example_inputs(){options})
{comparison}

if __name__ == "__main__":
    main()
'''


def script_text(
    summary: str, made: str, imports: Sequence[str], definitions: Sequence[str], options: Mapping[str, str],
    judgement: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Return a script that optimizes a model and, with the arguments of a `judgement`, compares the result.

    The definitions are those of PASSES, build() and example_inputs(); the options are further arguments of `optimize`,
    as code.
    """
    imports, comparison = [*imports, "", "import fxopt"], ""
    if judgement is not None:
        imports.append("from fxopt.testing import assert_equivalent")
        comparison = f"    assert_equivalent(model, fast, example_inputs(){_keywords(judgement)})\n"
    return _SCRIPT.format(
        summary=" ".join(summary.split()).replace("\\", "/").replace('"""', "'''"), made=made,
        imports="\n".join(imports), definitions="\n\n\n".join(definitions), options=_keywords(options),
        comparison=comparison,
    )  # fmt: skip


def _keywords(given: Mapping[str, str]) -> str:
    return "".join(f", {name}={value}" for name, value in given.items())
