// Elements. Contents are set as text, never as markup: names and errors come from outside.

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const { data = {}, ...others } = properties;
  const element = Object.assign(document.createElement(tag), others);
  Object.assign(element.dataset, data);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Set a text only if it differs, so that a selection stays.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// One child of `parent` for each item, in order. A child stays the same element as long as its key is there.
export function keyed(parent, items, keyOf, create, update) {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, at) => {
    const key = keyOf(item);
    let child = there.get(key);
    if (child) there.delete(key);
    else {
      child = create(item);
      child.dataset.key = key;
    }
    update(child, item);
    if (child.cells) headed(child, parent);
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
  for (const child of there.values()) child.remove();
}

// Each cell knows its column's name: on a phone a row is a list.
export function headed(row, body = row.parentElement) {
  const heads = body.parentElement.tHead.rows[0].cells;
  [...row.cells].forEach((cell, at) => { cell.dataset.head = heads[at].textContent; });
}

// A row with as many cells as there are texts; `figures` are the positions of those that are figures.
export function cells(row, texts, figures = new Set()) {
  texts.forEach((text, at) => {
    if (!row.cells[at]) row.append(make("td", { className: figures.has(at) ? "figure" : "" }));
    setText(row.cells[at], text);
  });
}

// A bar with a text below it. `share`: 0 to 1, or null if there is no limit.
export function setBar(cell, share, text) {
  if (!cell.firstChild) {
    cell.append(make("div", { className: "bar" }, make("div")), make("span"));
  }
  const [bar, said] = cell.children;
  bar.hidden = share === null;
  bar.firstChild.style.width = `${100 * Math.min(1, share ?? 0)}%`;
  bar.classList.toggle("full", (share ?? 0) > 0.97);
  setText(said, text);
}

// Text with `code` in it.
export function prose(text) {
  return text.split("`").map((part, at) => (at % 2 ? make("code", { textContent: part }) : part));
}
