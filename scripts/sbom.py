"""Software bill of materials: one CycloneDX file per extra, and a list of licences.

    python -m scripts.sbom [--out dist]

Describes the versions that the tests ran with, as installed in this environment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from scripts.closure import PARTS, PROJECT, Part, closure
from scripts.release import version as release_version

UNKNOWN = "unknown"

_CLASSIFIER = "License :: "
_PROSE = 60
"""A ``License`` field longer than this is the text of a licence, not its name."""


def licence(name: str) -> str:
    """Licence of an installed distribution: its expression, else its field, else its classifier."""
    metadata = importlib.metadata.metadata(name)
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    field = metadata["License"].strip() if "License" in metadata else ""
    if field and len(field) <= _PROSE and "\n" not in field and field.upper() != "UNKNOWN":
        return field
    names = [
        text.rsplit(" :: ", 1)[-1]
        for text in metadata.get_all("Classifier") or []
        if text.startswith(_CLASSIFIER)
    ]
    return " or ".join(names) or UNKNOWN


def bom(part: Part) -> Bom:
    """The part as a CycloneDX document."""
    document = Bom()
    title = f"{PROJECT}[{part.extra}]" if part.extra else PROJECT
    root = _component(PROJECT, title, ComponentType.APPLICATION)
    document.metadata.component = root
    components = {name: _component(name, name, ComponentType.LIBRARY) for name in part.requires}
    for component in components.values():
        document.components.add(component)
    document.register_dependency(root, components.values())
    for name, children in part.requires.items():
        document.register_dependency(components[name], [components[c] for c in sorted(children)])
    return document


def _component(name: str, title: str, kind: ComponentType) -> Component:
    version = release_version() if name == PROJECT else importlib.metadata.version(name)
    factory = LicenseFactory()
    return Component(
        name=title,
        version=version,
        type=kind,
        licenses=[factory.make_from_string(licence(name))],
        purl=PackageURL("pypi", name=name, version=version.partition("+")[0]),
        bom_ref=f"{name}=={version}",
    )


def licence_table(parts: Iterable[Part]) -> str:
    """All distributions of all parts with licence and the extras that bring them, as Markdown."""
    brings: dict[str, list[str]] = {}
    for part in parts:
        for name in part.requires:
            brings.setdefault(name, []).append(part.extra or "(always)")
    rows = ["| distribution | version | licence | comes with |", "|---|---|---|---|"]
    for name in sorted(brings):
        extras = ["(always)"] if "(always)" in brings[name] else brings[name]
        text = re.sub(r"\s+", " ", licence(name)).replace("|", "/")
        version = importlib.metadata.version(name)
        rows.append(f"| {name} | {version} | {text} | {', '.join(extras)} |")
    return "\n".join(rows) + "\n"


def write(out: Path) -> list[Path]:
    """Write all files into ``out``; return them."""
    out.mkdir(parents=True, exist_ok=True)
    parts = [closure(extra) for extra in PARTS]
    written = []
    for part in parts:
        path = out / f"sbom-{part.extra or 'core'}.cdx.json"
        path.write_text(JsonV1Dot6(bom(part)).output_as_string(indent=1))
        written.append(path)
    licences = out / "licences.md"
    licences.write_text(licence_table(parts))
    return [*written, licences]


def main() -> None:
    """Write the files and name them."""
    parser = argparse.ArgumentParser(prog="python -m scripts.sbom", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of the files")
    print("\n".join(str(path) for path in write(parser.parse_args().out)))


if __name__ == "__main__":
    main()
