// Making and changing elements. Text is only ever set as text: what a replica calls itself or its
// models is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.filter((each) => each !== null && each !== undefined));
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null || value === undefined) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// Makes the children of a list or table those of the items, each kept as long as its key is there.
export function reconcile(parent, items, keyOf, make, update = () => {}) {
  const known = new Map([...parent.children].map((each) => [each.dataset.key, each]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    known.delete(key);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = key;
    }
    update(child, item);
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
  }
  for (const gone of known.values()) gone.remove();
}

export function cell(label, className, ...children) {
  return element("td", { role: "cell", "data-label": label, class: className }, ...children);
}

export function headings(row, names) {
  for (const [name, className, title] of names) {
    const attributes = { role: "columnheader", scope: "col", class: className, title };
    row.append(element("th", attributes, name));
  }
}

// A bar of parts, [class, share of the whole] each; its figures stand beside it as text.
export function bar(parts, className = "bar") {
  const made = element("div", { class: className, "aria-hidden": "true" });
  for (const [name, share] of parts) {
    if (share > 0) {
      const part = element("span", { class: name });
      part.style.width = `${Math.min(1, share) * 100}%`;
      made.append(part);
    }
  }
  return made;
}
