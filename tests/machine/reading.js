// What tests/machine/test_site.py asks of a page: each function returns its findings as a list, or a number.

// The parts of the text that stick out of the window, though they are in no box that scrolls.
function wider() {
  // Not innerWidth: a phone makes the window as wide as what sticks out.
  const width = document.documentElement.clientWidth
  const inside = (node) => {
    for (let box = node.parentElement; box && box !== document.body; box = box.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return true
    return false
  }
  const parts = [...document.querySelectorAll("article *")].filter((node) => {
    const box = node.getBoundingClientRect()
    return box.width && (box.right > width + 1 || box.left < -1) && !inside(node)
  })
  const page = document.documentElement.scrollWidth > width ? ["the page"] : []
  return [...page, ...parts.map((node) => node.outerHTML.slice(0, 80))]
}

const numbers = (colour) => colour.match(/[\d.]+/g).map(Number)

// How light a colour is, from 0 to 1, as WCAG counts.
function lightness(colour) {
  const [r, g, b] = colour.map((part) => part / 255).map((part) => (part <= 0.04 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
  return 0.2126 * r + 0.7152 * g + 0.0722 * b
}

function over(above, below) {
  const share = above[3] ?? 1
  return [0, 1, 2].map((part) => above[part] * share + below[part] * (1 - share))
}

function background(node) {
  return node ? over(numbers(getComputedStyle(node).backgroundColor), background(node.parentElement)) : [255, 255, 255]
}

function ground() {
  return lightness(background(document.querySelector("article")))
}

// The kinds of text with too little contrast to be read easily.
function faint() {
  const found = new Set()
  for (const node of document.querySelectorAll("article :is(h1, h2, p, li, td, code, a, code span)")) {
    if (!node.innerText.trim() || node.classList.contains("headerlink")) continue
    const behind = background(node)
    const [one, other] = [over(numbers(getComputedStyle(node).color), behind), behind].map(lightness)
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)
    if (contrast < 4.5) found.add(`${node.tagName} ${node.className} ${contrast.toFixed(1)}`)
  }
  return [...found]
}

// The search of the theme is in a shadow tree: its field, and the pages that it shows as found.
const search = () => [...document.querySelectorAll("*")].map((node) => node.shadowRoot).find((root) => root?.querySelector("input"))

function typing() {
  return search()?.activeElement?.tagName === "INPUT"
}

function results() {
  return [...(search()?.querySelectorAll("a[href]") ?? [])].map((link) => link.href)
}
