"""A gate as JUnit XML, for a CI server: one test case for each rule of each arm."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from loadpeak_exporter.ab.gate import Verdict

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has no way to write."""


def render(verdict: Verdict, title: str) -> str:
    """The suite. What was not judged is a failure too, of a type of its own: the gate does not pass."""
    failures = sum(entry.passed is not True for entry in verdict.gate)
    counts = {"tests": str(len(verdict.gate)), "failures": str(failures), "errors": "0", "skipped": "0"}
    root = ElementTree.Element("testsuites", {"name": _text(title), **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _text(title), **counts})
    fixes = {pair.fix.arm for pair in verdict.pairs}
    for entry in verdict.gate:
        arm = entry.arm or next(iter(fixes))
        case = ElementTree.SubElement(suite, "testcase", {"classname": _text(str(arm)), "name": entry.rule})
        if entry.passed is True:
            ElementTree.SubElement(case, "system-out").text = _text(entry.detail)
            continue
        kind = "failed" if entry.passed is False else "not-judged"
        detail = _text(entry.detail)
        ElementTree.SubElement(case, "failure", {"type": kind, "message": detail}).text = detail
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _text(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
