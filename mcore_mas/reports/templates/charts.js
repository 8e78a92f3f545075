// Line charts of the studio, drawn by Vega. Vega's expressions are interpreted, because the page's
// content security policy lets no text be compiled to code.
"use strict";

const CHART_HEIGHT = 170;  // pixels, as of .plot in studio.html.jinja
const MAX_POINTS = 500;  // of a line; longer lines are drawn through means of neighbouring points
const MAX_MARKS = 60;  // points of a sparse line that are marked; a longer line has no marks

// Return a chart with a line for each series, a legend, and a tooltip that follows the mouse.
//
// The chart is drawn when it comes into view. Its methods:
//   show({lines, baseline, smoothing}): replace the data. A line has an id, label ("" for the only
//     line), detail (a longer label), colour, dash, points [[x, y], ...], isSparse (points are marked,
//     and never smoothed) and perhaps a band [[x, low, high], ...]. The baseline is {y, label} or
//     null. `smoothing` is the number of points over which a running mean is taken.
//   remove(): free the memory.
//   values(): the drawn points.
// `detail` is shown when the mouse is over the title, `unit` is one of UNITS in studio.js, `xAxis`
// has properties of Vega's axis, and `xLabel` returns the text of an x for the tooltip.
function lineChart({title, detail, unit, xAxis, xLabel}) {
  const legend = element("ul", null);
  legend.className = "legend";
  const name = element("span", title, unit.label ? [element("small", unit.label)] : []);
  name.title = detail;
  const newest = element("b", "");
  const heading = element("figcaption", null, [name, newest]);
  const plot = element("div", null);
  plot.className = "plot";
  const figure = element("figure", null, [heading, plot, legend]);

  let data = null;
  let view = null;
  let isVisible = false;
  let drawing = Promise.resolve();

  function show(newData) {
    data = newData;
    showLegend();
    redraw();
  }

  // Draw after the drawing in progress, because Vega cannot run a view twice at a time.
  function redraw() {
    drawing = drawing.then(draw).catch(error => {
      plot.textContent = `This chart cannot be drawn: ${error.message}`;
    });
  }

  async function draw() {
    if (!isVisible || !plot.clientWidth || !data) return;
    if (view === null) {
      const options = {mode: "vega", ast: true, renderer: "svg", actions: false, hover: false, tooltip: false};
      const result = await vegaEmbed(plot, lineChartSpec(xAxis), options);
      view = result.view;
    }
    const stride = Math.ceil(Math.max(1, ...data.lines.map(line => line.points.length)) / MAX_POINTS);
    const smoothing = Math.max(1, Math.round(data.smoothing / stride));
    const points = [];
    const marks = [];
    const bands = [];
    for (const line of data.lines) {
      const style = {id: line.id, colour: line.colour, dash: line.dash};
      const isSmoothed = smoothing > 1 && !line.isSparse;
      for (const [x, y] of thinned(line.points, stride)) points.push({...style, x, y, isSmoothed});
      if (line.points.length === 1 || (line.isSparse && line.points.length <= MAX_MARKS)) {
        for (const [x, y] of line.points) marks.push({...style, x, y});
      }
    }
    const {xs, ys} = chartDomains(data, unit.bounds);
    const inDomain = y => Math.min(Math.max(y, ys[0]), ys[1]);
    for (const line of data.lines) {
      const style = {id: line.id, colour: line.colour, dash: line.dash};
      for (const [x, low, high] of line.band || []) bands.push({...style, x, low: inDomain(low), high: inDomain(high)});
    }
    view.signal("xs", xs).signal("ys", ys)
      .signal("format", unit.format(ys))
      .signal("baseline", data.baseline ? data.baseline.y : null)
      .signal("baselineLabel", data.baseline ? data.baseline.label : "")
      .signal("smoothing", smoothing)
      .data("points", points).data("marks", marks).data("bands", bands)
      .width(plot.clientWidth);
    await view.runAsync();
    plot.dataset.drawn = String(points.length);
  }

  // A single line has its newest value in the heading, and needs no legend.
  function showLegend() {
    const isSingle = data.lines.length === 1 && data.lines[0].label === "";
    newest.textContent = isSingle ? unit.value(last(data.lines[0].points)[1]) : "";
    legend.hidden = isSingle;
    legend.replaceChildren(...(isSingle ? [] : data.lines.map(legendEntry)));
  }

  function legendEntry(line) {
    const swatch = element("i", null);
    swatch.style.borderColor = line.colour;
    swatch.style.borderTopStyle = line.dash.length ? "dashed" : "solid";
    const value = element("b", unit.value(last(line.points)[1]));
    const entry = element("li", null, [swatch, element("span", line.label), value]);
    entry.title = line.detail;
    entry.onmouseenter = () => focus(line.id);
    entry.onmouseleave = () => focus("");
    return entry;
  }

  function focus(id) {
    if (view) view.signal("focus", id).runAsync();
  }

  plot.onpointermove = event => {
    if (!view) return;
    const box = plot.getBoundingClientRect();
    const x = view.scale("x").invert(event.clientX - box.left - view.origin()[0]);
    const pointed = nearestX(data.lines, x);
    if (pointed === null) return;
    const rows = data.lines.map(line => [line, valueAt(line, pointed)]).filter(row => row[1] !== null);
    view.signal("pointedX", pointed).data("pointed", rows.map(([line, y]) => ({id: line.id, colour: line.colour, x: pointed, y}))).runAsync();
    showTooltip(event, xLabel(pointed), rows.map(([line, y]) => [line.colour, line.detail || title, unit.value(y)]));
  };
  plot.onpointerleave = () => {
    hideTooltip();
    if (view) view.signal("pointedX", null).data("pointed", []).runAsync();
  };

  const visibility = new IntersectionObserver(entries => {
    isVisible = last(entries).isIntersecting;
    if (isVisible) redraw();
  }, {rootMargin: "200px"});
  visibility.observe(figure);
  const size = new ResizeObserver(redraw);
  size.observe(plot);

  function remove() {
    visibility.disconnect();
    size.disconnect();
    if (view) view.finalize();
  }

  // Return the drawn points: x, y, and y of the line through running means.
  async function values() {
    await drawing;
    return view ? view.data("points").map(({x, y, line}) => ({x, y, line})) : [];
  }

  return {figure, show, remove, values};
}

// Return the domains of a chart's axes. A single x, and values that are all equal, get some space
// around them. If all values are within the bounds of the unit, so is the y axis.
function chartDomains({lines, baseline}, bounds) {
  const xs = lines.flatMap(line => line.points.map(point => point[0]));
  const ys = lines.flatMap(line => line.points.map(point => point[1]));
  if (baseline) ys.push(baseline.y);
  const isBounded = bounds && ys.every(y => bounds[0] <= y && y <= bounds[1]);
  for (const line of lines) for (const [, low, high] of line.band || []) ys.push(low, high);
  const [low, high] = widened(extent(ys), 0);
  return {
    xs: widened(extent(xs), 0.5),
    ys: isBounded ? [Math.max(low, bounds[0]), Math.min(high, bounds[1])] : [low, high],
  };
}

// Return the mean of each group of `stride` neighbouring points.
function thinned(points, stride) {
  if (stride === 1) return points;
  const means = [];
  for (let start = 0; start < points.length; start += stride) {
    const group = points.slice(start, start + stride);
    means.push([0, 1].map(axis => group.reduce((sum, point) => sum + point[axis], 0) / group.length));
  }
  return means;
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

// Return a domain that is not empty: an empty one gets a margin at both ends, or a tenth of its value
// if the margin is 0.
function widened([low, high], margin) {
  if (low < high) return [low, high];
  const size = margin || Math.abs(low) / 10 || 1;
  return [low - size, high + size];
}

// Return the x of the point, on any line, that is nearest to a position on the x axis; null without
// points.
function nearestX(lines, x) {
  let nearest = null;
  for (const line of lines) {
    for (const point of line.points) {
      if (nearest === null || Math.abs(point[0] - x) < Math.abs(nearest - x)) nearest = point[0];
    }
  }
  return nearest;
}

function valueAt(line, x) {
  const point = line.points.find(candidate => candidate[0] === x);
  return point === undefined ? null : point[1];
}

// Specification of a chart. Data and domains are set later, through signals and data sets.
function lineChartSpec(xAxis) {
  const opacity = value => ({signal: `!focus || focus === datum.id ? ${value} : ${value} * 0.15`});
  const position = field => ({scale: field === "x" ? "x" : "y", field});
  const axis = {
    domain: false, ticks: true, tickSize: 4, labelColor: "var(--soft)", titleColor: "var(--soft)", gridColor: "var(--line)",
    tickColor: "var(--line)", labelFontSize: 11, titleFontSize: 11, titleFontWeight: 400, labelFont: "system-ui, sans-serif", titleFont: "system-ui, sans-serif",
  };
  const line = (name, source, field, width, value) => ({
    type: "group",
    name,
    from: {facet: {name: `${name}_facet`, data: source, groupby: "id"}},
    marks: [{
      type: "line",
      name: `${name}_line`,
      interactive: false,
      from: {data: `${name}_facet`},
      encode: {update: {
        x: position("x"), y: position(field), stroke: {field: "colour"}, strokeDash: {field: "dash"},
        strokeWidth: {value: width}, strokeJoin: {value: "round"}, opacity: value,
      }},
    }],
  });
  return {
    $schema: "https://vega.github.io/schema/vega/v5.json",
    description: "",
    width: 300,
    height: CHART_HEIGHT,
    autosize: {type: "fit", contains: "padding"},
    padding: {left: 0, right: 4, top: 6, bottom: 5},
    background: null,
    signals: [
      {name: "xs", value: [0, 1]}, {name: "ys", value: [0, 1]}, {name: "format", value: "~g"},
      {name: "pointedX", value: null}, {name: "focus", value: ""}, {name: "smoothing", value: 1},
      {name: "baseline", value: null}, {name: "baselineLabel", value: ""},
      // Frame of the running mean: this row and those before it.
      {name: "frame", update: "[1 - smoothing, 0]"},
    ],
    data: [
      {name: "points", transform: [
        {type: "window", groupby: ["id"], sort: {field: "x"}, ops: ["mean"], fields: ["y"], as: ["mean"], frame: {signal: "frame"}},
        {type: "formula", as: "line", expr: "datum.isSmoothed ? datum.mean : datum.y"},
      ]},
      {name: "raw", source: "points", transform: [{type: "filter", expr: "datum.isSmoothed"}]},
      {name: "marks"}, {name: "bands"}, {name: "pointed"},
    ],
    scales: [
      {name: "x", type: "linear", range: "width", domain: {signal: "xs"}, zero: false, nice: false, padding: 4},
      {name: "y", type: "linear", range: "height", domain: {signal: "ys"}, zero: false, nice: 4},
    ],
    axes: [
      {...axis, orient: "left", scale: "y", grid: true, ticks: false, labelPadding: 6, tickCount: 4, format: {signal: "format"}},
      {...axis, orient: "bottom", ...xAxis, scale: "x", titlePadding: 2, tickCount: {signal: "min(6, ceil(width / 60))"}, labelFlush: true},
    ],
    marks: [
      {
        type: "group", name: "band_groups", interactive: false,
        from: {facet: {name: "bands_facet", data: "bands", groupby: "id"}},
        marks: [{type: "area", interactive: false, from: {data: "bands_facet"}, encode: {update: {
          x: position("x"), y: position("low"), y2: position("high"), fill: {field: "colour"}, opacity: opacity(0.12),
        }}}],
      },
      {type: "rule", name: "baseline", interactive: false, encode: {update: {
        x: {value: 0}, x2: {signal: "width"}, y: {signal: "baseline === null ? 0 : scale('y', baseline)"},
        stroke: {value: "var(--soft)"}, strokeDash: {value: [2, 3]}, opacity: {signal: "baseline === null ? 0 : 1"},
      }}},
      {type: "text", name: "baseline_label", interactive: false, encode: {update: {
        x: {signal: "width"}, y: {signal: "baseline === null ? 0 : scale('y', baseline)"}, dy: {value: -4}, align: {value: "right"},
        text: {signal: "baselineLabel"}, fill: {value: "var(--soft)"}, fontSize: {value: 11}, font: {value: "system-ui, sans-serif"},
      }}},
      line("raw_lines", "raw", "y", 1, opacity(0.25)),
      line("lines", "points", "line", 1.8, opacity(1)),
      {type: "symbol", name: "mark_points", interactive: false, from: {data: "marks"}, encode: {update: {
        x: position("x"), y: position("y"), fill: {field: "colour"}, size: {value: 22}, opacity: opacity(1),
      }}},
      {type: "rule", name: "pointer", interactive: false, encode: {update: {
        x: {signal: "pointedX === null ? 0 : scale('x', pointedX)"}, y: {value: 0}, y2: {signal: "height"},
        stroke: {value: "var(--soft)"}, opacity: {signal: "pointedX === null ? 0 : 0.6"},
      }}},
      {type: "symbol", name: "pointed_points", interactive: false, from: {data: "pointed"}, encode: {update: {
        x: position("x"), y: position("y"), fill: {field: "colour"}, stroke: {value: "var(--page)"}, size: {value: 36},
      }}},
    ],
  };
}

// Show values beside the mouse, on its left near the right edge of the window.
function showTooltip(event, heading, rows) {
  const tooltip = byId("tooltip");
  const lines = rows.map(([colour, label, value]) => {
    const swatch = element("i", null);
    swatch.style.background = colour;
    return element("div", null, [swatch, element("span", label), element("b", value)]);
  });
  tooltip.replaceChildren(element("strong", heading), ...lines);
  tooltip.hidden = false;
  const {width, height} = tooltip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  tooltip.style.left = `${Math.max(4, left)}px`;
  tooltip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - height - 4))}px`;
}

function hideTooltip() {
  byId("tooltip").hidden = true;
}
