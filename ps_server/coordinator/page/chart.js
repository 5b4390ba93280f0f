// Charts as SVG. Each says its figures in words below, and has a table of them that opens.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 100;
const TABLE_ROWS = 12;

function draw(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  return element;
}

function drawing(kind) {
  return draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true", class: kind });
}

// The parts of a curve without a gap, as lists of [x, y].
function partsOf(points, most) {
  const parts = [];
  let part = [];
  points.forEach((point, index) => {
    if (isNumber(point)) {
      const x = points.length > 1 ? (WIDTH * index) / (points.length - 1) : WIDTH;
      part.push([x.toFixed(1), (HEIGHT - (HEIGHT - 4) * (most > 0 ? point / most : 0)).toFixed(1)]);
    } else if (part.length) {
      parts.push(part);
      part = [];
    }
  });
  return part.length ? [...parts, part] : parts;
}

function curvesOf(points, most) {
  return partsOf(points, most).map((part) =>
    part.length === 1
      ? draw("circle", { class: "dot", cx: part[0][0], cy: part[0][1], r: 3 })
      : draw("polyline", { class: "curve", points: part.map((point) => point.join(",")).join(" ") }),
  );
}

// A chart of a series: its points, the oldest first, are everySec apart and end now. A gap is null.
function chart(id, title, points, everySec, format) {
  return {
    id,
    create: () => createChart(title),
    fill: (section) => {
      const known = points.filter(isNumber);
      const most = known.reduce((a, b) => Math.max(a, b), 0);
      const [title_, figure, details] = section.children;
      const [top, svg, below, caption] = figure.children;
      setText(title_, title);
      setText(top, known.length ? format(most) : DASH);
      if (svg.dataset.points !== String(points)) {
        svg.dataset.points = String(points);
        svg.replaceChildren(...curvesOf(points, most));
      }
      const since = points.length > 1 ? `${ageOf((points.length - 1) * everySec)} ago` : "";
      setText(below.children[0], since);
      setText(below.children[1], "now");
      setText(caption, captionOf(known, points, format));
      details.hidden = known.length === 0;
      fillFigures(details.lastElementChild.lastElementChild, points, everySec, format);
    },
  };
}

function createChart(title) {
  const section = make("section");
  const figure = make("figure");
  const below = make("div", { class: "axis" });
  below.append(make("span"), make("span"));
  figure.append(make("div", { class: "axis" }), drawing(""), below, make("figcaption"));
  const details = make("details");
  const figures = make("table", { "aria-label": title });
  const head = make("tr");
  head.append(make("th", { scope: "col" }, "ago"), make("th", { scope: "col", class: "number" }, "value"));
  figures.append(make("thead"), make("tbody"));
  figures.firstElementChild.append(head);
  details.append(make("summary", {}, "Figures"), figures);
  section.append(make("h2"), figure, details);
  return section;
}

function captionOf(known, points, format) {
  if (!known.length) {
    return "no figure yet";
  }
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  const least = known.reduce((a, b) => Math.min(a, b), Infinity);
  const most = known.reduce((a, b) => Math.max(a, b), -Infinity);
  return `now ${format(points[points.length - 1])}; mean ${format(mean)}, least ${format(least)}, most ${format(most)}`;
}

function fillFigures(body, points, everySec, format) {
  const step = Math.max(1, Math.ceil(points.length / TABLE_ROWS));
  const places = [];
  for (let place = points.length - 1; place >= 0; place -= step) {
    places.push(place);
  }
  matchLength(body, places.length, () => emptyRow([["ago", ""], ["value", "number"]]));
  places.forEach((place, index) => {
    fillRow(body.children[index], [ageOf((points.length - 1 - place) * everySec), format(points[place])]);
  });
}

// A sparkline with its newest figure, in a cell of a table.
function fillSpark(cell, points, text) {
  if (cell.dataset.points !== String(points)) {
    cell.dataset.points = String(points);
    const svg = drawing("spark");
    svg.append(...curvesOf(points, points.filter(isNumber).reduce((a, b) => Math.max(a, b), 0)));
    cell.replaceChildren(svg, make("span"));
  }
  setText(cell.lastElementChild, text);
}

// Bars of counts: [label, count] of each.
function bars(id, title, counts) {
  const all = counts.reduce((sum, [, count]) => sum + (isNumber(count) ? count : 0), 0);
  const most = counts.reduce((a, [, count]) => (isNumber(count) ? Math.max(a, count) : a), 0);
  return {
    id,
    create: () => createChart(title),
    fill: (section) => {
      const [title_, figure, details] = section.children;
      const [top, svg, below, caption] = figure.children;
      setText(title_, title);
      setText(top, most ? shareOf(most, all) : DASH);
      const width = WIDTH / Math.max(1, counts.length);
      svg.replaceChildren(
        ...counts.map(([, count], index) => {
          const height = isNumber(count) && most ? ((HEIGHT - 4) * count) / most : 0;
          const box = { x: index * width + width * 0.1, y: HEIGHT - height, width: width * 0.8, height };
          return draw("rect", { class: "bar", ...box });
        }),
      );
      setText(below.children[0], counts.length ? counts[0][0] : "");
      setText(below.children[1], counts.length > 1 ? counts[counts.length - 1][0] : "");
      const share = (count) => (all ? ` (${shareOf(count, all)})` : "");
      setText(caption, counts.map(([label, count]) => `${label}: ${countOf(count)}${share(count)}`).join("; ") || DASH);
      details.hidden = true;
    },
  };
}
