"""Panel builders. A panel has a title, a description, a unit and a legend that names what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grafanalib import core

from loadpeak_dashboards.grafana import Panel, Target
from loadpeak_dashboards.queries import numbered

RED, ORANGE, GREEN, BLUE, PURPLE, GREY = "red", "orange", "green", "blue", "purple", "#8e8e8e"
OUTCOMES = {"loading": BLUE, "ready": GREEN, "oom": RED, "failed": ORANGE, "killed": PURPLE}
SERIES = {"device": ORANGE, "reserved": BLUE, "allocated": GREEN, "baseline": RED, "fix": GREEN}

Query = tuple[str, str]
"""An expression and its legend."""


def at(x: int, y: int, w: int, h: int) -> core.GridPos:
    """A place on the grid of 24 columns."""
    return core.GridPos(h=h, w=w, x=x, y=y)


def row(title: str, y: int) -> core.RowPanel:
    """A heading over the full width."""
    return _Row(title=title, gridPos=at(0, y, 24, 1))


class _Row(core.RowPanel):  # type: ignore[misc]
    def to_json_data(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "row",
            "title": self.title,
            "gridPos": self.gridPos,
            "collapsed": False,
            "panels": [],
        }


def targets(queries: Sequence[Query], *, instant: bool = False, table: bool = False) -> list[Target]:
    """Queries with letters, as time series or as instant tables."""
    return [
        Target(
            expr=expression,
            legendFormat=legend,
            refId=chr(ord("A") + number),
            instant=instant,
            format="table" if table else "time_series",
        )
        for number, (expression, legend) in enumerate(queries)
    ]


def override(name: str, *properties: tuple[str, Any], matcher: str = "byName") -> dict[str, Any]:
    """Field options for the fields of a name (or pattern, or type)."""
    pairs = [{"id": key, "value": value} for key, value in properties]
    return {"matcher": {"id": matcher, "options": name}, "properties": pairs}


def coloured(colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """Fixed colours for fields whose names match these patterns."""
    return [
        override(f"/{pattern}/", ("color", {"mode": "fixed", "fixedColor": colour}), matcher="byRegexp")
        for pattern, colour in colours.items()
    ]


def steps(*pairs: tuple[float | None, str]) -> dict[str, Any]:
    """Thresholds from value and colour, the first without a value."""
    return {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in pairs]}


def link(title: str, url: str) -> dict[str, Any]:
    """A data link that opens in the same window."""
    return {"title": title, "url": url, "targetBlank": False}


def _table_columns(queries: Sequence[Query]) -> tuple[dict[str, str], dict[str, bool]]:
    """Of joined tables: the legend of each value column, and the time columns, which nobody wants to see."""
    if len(queries) == 1:
        return {"Value": queries[0][1]}, {"Time": True}
    columns = {f"Value #{chr(ord('A') + number)}": legend for number, (_, legend) in enumerate(queries)}
    times = {"Time": True, **{f"Time {number}": True for number in range(1, len(queries) + 1)}}
    return columns, times


LEGEND_BELOW = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
LEGEND_TABLE = {
    "displayMode": "table",
    "placement": "right",
    "showLegend": True,
    "calcs": ["max", "lastNotNull"],
}
TOOLTIP = {"mode": "multi", "sort": "desc"}
_LINES = {
    "drawStyle": "line",
    "lineWidth": 2,
    "fillOpacity": 0,
    "lineInterpolation": "linear",
    "showPoints": "never",
    "spanNulls": False,
    "axisSoftMin": 0,
}

_STARTS = {"showPoints": "always", "pointSize": 4, "lineWidth": 1, "insertNulls": 10_000}
"""Of series that are there while something starts: apart for more than 10 s is another start."""


def timeline(
    title: str,
    description: str,
    place: core.GridPos,
    queries: Sequence[Query],
    *,
    unit: str = "bytes",
    colours: Mapping[str, str] | None = None,
    overrides: Sequence[dict[str, Any]] = (),
    points: bool = False,
) -> Panel:
    """Curves over time; memory changes in steps and is drawn so. With ``points`` lone values show too."""
    return Panel(
        kind="timeseries",
        title=title,
        description=description,
        gridPos=place,
        targets=targets(queries),
        unit=unit,
        custom={
            **_LINES,
            "lineInterpolation": "stepAfter",
            **(_STARTS if points else {}),
        },
        options={"legend": LEGEND_BELOW, "tooltip": TOOLTIP},
        overrides=[*coloured(colours or {}), *overrides],
    )


def stat(
    title: str,
    description: str,
    place: core.GridPos,
    query: Query,
    *,
    unit: str = "bytes",
    decimals: int | None = None,
    thresholds: dict[str, Any] | None = None,
    mappings: Sequence[dict[str, Any]] = (),
    name: bool = False,
    none: str = "—",
) -> Panel:
    """One figure; with ``name`` the name of the series is what is shown."""
    defaults: dict[str, Any] = {"mappings": list(mappings), "noValue": none}
    defaults["color"] = {"mode": "fixed", "fixedColor": "text"}
    if thresholds is not None:
        defaults |= {"thresholds": thresholds, "color": {"mode": "thresholds"}}
    if decimals is not None:
        defaults["decimals"] = decimals
    return Panel(
        kind="stat",
        title=title,
        description=description,
        gridPos=place,
        targets=targets([query], instant=True),
        unit=unit,
        defaults=defaults,
        options={
            "colorMode": "background_solid" if thresholds is not None else "value",
            "graphMode": "none",
            "justifyMode": "center",
            "orientation": "auto",
            "textMode": "name" if name else "value",
            "wideLayout": True,
            "showPercentChange": False,
            "percentChangeColorMode": "standard",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    )


def per_layer(
    title: str,
    description: str,
    place: core.GridPos,
    queries: Sequence[Query],
    *,
    unit: str = "bytes",
    colours: Mapping[str, str] | None = None,
    dashed: Sequence[str] = (),
    bars: bool = False,
    none: str | None = None,
) -> Panel:
    """Curves over the layer number; each query has the label ``layer`` and nothing else."""
    renamed, hidden = _table_columns(queries)
    dash = [override(name, ("custom.lineStyle", {"fill": "dash", "dash": [8, 6]})) for name in dashed]
    draw = {"drawStyle": "bars", "fillOpacity": 70, "lineWidth": 1} if bars else {}
    return Panel(
        kind="trend",
        title=title,
        description=description,
        gridPos=place,
        targets=targets(queries, instant=True, table=True),
        unit=unit,
        custom={**_LINES, **draw},
        defaults={} if none is None else {"noValue": none},
        options={"legend": LEGEND_BELOW, "tooltip": TOOLTIP, "xField": "layer"},
        overrides=[
            override("layer", ("unit", "none"), ("decimals", 0), ("custom.axisLabel", "layer")),
            *coloured({f"^{name}$": colour for name, colour in (colours or {}).items()}),
            *dash,
        ],
        transformations=[
            {"id": "joinByField", "options": {"byField": "layer", "mode": "outer"}},
            {
                "id": "convertFieldType",
                "options": {
                    "conversions": [{"targetField": "layer", "destinationType": "number"}],
                    "fields": {},
                },
            },
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "layer"}]}},
            {
                "id": "organize",
                "options": {"excludeByName": hidden, "indexByName": {}, "renameByName": renamed},
            },
        ],
    )


def bars(
    title: str,
    description: str,
    place: core.GridPos,
    queries: Sequence[Query],
    label: str,
    order: Sequence[str],
    *,
    unit: str = "bytes",
    colours: Mapping[str, str] | None = None,
) -> Panel:
    """Groups of bars by the values of a label, from top to bottom in a given order."""
    ordered = [*queries, (numbered(label, order), "order")]
    columns, hidden = _table_columns(ordered)
    place_of = next(column for column, legend in columns.items() if legend == "order")
    return Panel(
        kind="barchart",
        title=title,
        description=description,
        gridPos=place,
        targets=targets(ordered, instant=True, table=True),
        unit=unit,
        custom={"fillOpacity": 80, "lineWidth": 1, "axisSoftMin": 0},
        options={
            "orientation": "horizontal",
            "xField": label,
            "xTickLabelRotation": 0,
            "xTickLabelMaxLength": 0,
            "xTickLabelSpacing": 0,
            "stacking": "none",
            "showValue": "never",
            "barWidth": 0.9,
            "barRadius": 0,
            "groupWidth": 0.75,
            "fullHighlight": False,
            "legend": LEGEND_BELOW,
            "tooltip": TOOLTIP,
        },
        overrides=[
            override(label, ("unit", "string")),
            *coloured({f"^{name}$": colour for name, colour in (colours or {}).items()}),
        ],
        transformations=[
            {"id": "joinByField", "options": {"byField": label, "mode": "outer"}},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": place_of}]}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {**hidden, place_of: True},
                    "indexByName": {},
                    "renameByName": columns,
                },
            },
        ],
    )


def states(
    title: str,
    description: str,
    place: core.GridPos,
    queries: Sequence[Query],
    colour: str = BLUE,
) -> Panel:
    """Rows of 0/1 series over time: a bar where it is 1."""
    mapping = {
        "0": {"text": "no", "color": "transparent", "index": 0},
        "1": {"text": "yes", "color": colour, "index": 1},
    }
    return Panel(
        kind="state-timeline",
        title=title,
        description=description,
        gridPos=place,
        targets=targets(queries),
        unit="none",
        custom={"fillOpacity": 80, "lineWidth": 0, "spanNulls": False},
        defaults={"mappings": [{"type": "value", "options": mapping}]},
        options={
            "showValue": "never",
            "rowHeight": 0.8,
            "mergeValues": True,
            "alignValue": "left",
            "legend": {**LEGEND_BELOW, "showLegend": False},
            "tooltip": {"mode": "single", "sort": "none"},
        },
    )


def table(
    title: str,
    description: str,
    place: core.GridPos,
    queries: Sequence[Query],
    columns: Mapping[str, str],
    *,
    sort_by: str,
    hidden: Sequence[str] = (),
    overrides: Sequence[dict[str, Any]] = (),
) -> Panel:
    """A table: the queries share their labels; ``columns`` are those shown, in order, with their names.

    The legend of a query is the name of its column, which comes after the first label; those in ``hidden``
    are left out.
    """
    renamed, times = _table_columns(queries)
    first, *rest = columns
    order = [first, *renamed, *rest]
    return Panel(
        kind="table",
        title=title,
        description=description,
        gridPos=place,
        targets=targets(queries, instant=True, table=True),
        unit="bytes",
        custom={"align": "auto", "inspect": False},
        options={
            "showHeader": True,
            "frameIndex": 0,
            "cellHeight": "sm",
            "sortBy": [{"displayName": sort_by, "desc": False}],
        },
        overrides=[override("string", ("unit", "string"), matcher="byType"), *overrides],
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {
                        **times,
                        **{name: True for name, shown in renamed.items() if shown in hidden},
                    },
                    "indexByName": {name: number for number, name in enumerate(order)},
                    "renameByName": {**columns, **renamed},
                },
            },
        ],
    )
