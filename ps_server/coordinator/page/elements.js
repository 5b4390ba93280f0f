// Elements of the page. Every text goes through textContent, so that a name is never markup. A block that is drawn again
// changes the elements that it has, so that focus, scrolling and selection stay.

const MOST_ROWS = 500;
const MOST_ON_A_LINE = 40; // characters of a name that is not broken

function make(tag, attributes, text) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    element.setAttribute(name, value);
  }
  if (text !== undefined) {
    element.textContent = text;
  }
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

// Shows blocks, in order, in the place of those that were shown before; a block keeps its element by its id.
function showBlocks(place, blocks) {
  const before = new Map([...place.children].map((child) => [child.id, child]));
  const now = blocks.map((block) => {
    const former = before.get(block.id);
    const element = former || block.create();
    element.id = block.id;
    block.fill(element);
    return element;
  });
  for (const child of [...place.children]) {
    if (!now.includes(child)) {
      child.remove();
    }
  }
  now.forEach((element, index) => {
    if (place.children[index] !== element) {
      place.insertBefore(element, place.children[index] || null);
    }
  });
}

function heading(id, text) {
  return { id, create: () => make("h1"), fill: (element) => setText(element, text) };
}

function note(id, text) {
  return { id, create: () => make("p", { class: "note" }), fill: (element) => setText(element, text) };
}

// Named figures: [name, text] of each, and [name, text, "wide"] of one that is long.
function facts(id, title, figures) {
  return {
    id,
    create: () => {
      const section = make("section", { "aria-label": title });
      section.append(make("dl"));
      return section;
    },
    fill: (section) => {
      const list = section.firstElementChild;
      matchLength(list, figures.length, () => {
        const entry = make("div");
        entry.append(make("dt"), make("dd"));
        return entry;
      });
      figures.forEach(([name, text, kind], index) => {
        const entry = list.children[index];
        entry.className = kind || "";
        setText(entry.children[0], name);
        setText(entry.children[1], text);
      });
    },
  };
}

// A table. A column is [name, kind]; the kind is "number", "name", "prose", or "". A cell is a text, or {text, bad} of a
// figure that is bad, or {text, points} of one with a sparkline. The first cell of a row is its heading. The source is
// what the rows are of: without rows and without it, nothing is known.
function table(id, title, columns, rows, source) {
  return {
    id,
    create: () => {
      const section = make("section");
      const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
      const body = make("table");
      body.append(make("thead"), make("tbody"));
      scroll.append(body);
      section.append(make("h2", {}, title), scroll, make("p", { class: "note" }));
      return section;
    },
    fill: (section) => {
      const [title_, scroll, left] = section.children;
      const [head, body] = scroll.firstElementChild.children;
      const named = columns.map(([name]) => name).join("\n");
      if (head.dataset.columns !== named) {
        head.dataset.columns = named;
        const row = make("tr");
        row.append(...columns.map(([name, kind]) => make("th", { scope: "col", class: kind }, name)));
        head.replaceChildren(row);
        body.replaceChildren();
      }
      setText(title_, title);
      const shown = rows.slice(0, MOST_ROWS);
      matchLength(body, shown.length, () => emptyRow(columns));
      shown.forEach((cells, index) => fillRow(body.children[index], cells));
      scroll.hidden = rows.length === 0;
      const more = rows.length - shown.length;
      const nothing = Array.isArray(source) ? "none" : DASH;
      setText(left, rows.length === 0 ? nothing : more > 0 ? `and ${countOf(more)} more, which sparserow status shows` : "");
    },
  };
}

function matchLength(parent, length, create) {
  while (parent.children.length > length) {
    parent.lastElementChild.remove();
  }
  while (parent.children.length < length) {
    parent.append(create());
  }
}

function emptyRow(columns) {
  const row = make("tr");
  row.append(
    ...columns.map(([, kind], index) => (index ? make("td", { class: kind }) : make("th", { scope: "row", class: kind }))),
  );
  return row;
}

function fillRow(row, cells) {
  cells.forEach((cell, index) => {
    const element = row.children[index];
    if (!isRecord(cell)) {
      element.classList.remove("bad-cell");
      setText(element, cell);
    } else if (cell.points) {
      fillSpark(element, cell.points, cell.text);
    } else {
      element.classList.toggle("bad-cell", Boolean(cell.bad));
      setText(element, cell.text);
    }
    element.classList.toggle("long", element.textContent.length > MOST_ON_A_LINE);
  });
}

// Blocks side by side.
function charts(id, blocks) {
  return {
    id,
    create: () => make("div", { class: "charts" }),
    fill: (element) => showBlocks(element, blocks),
  };
}
