"""Draw the diagrams of these pages as SVG: `python docs/diagrams.py`, and every build of the documentation.

The files in images/ are kept in the repository, since README.md shows one of them; a test compares them with what is
drawn here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
#: The test that holds the layers, and that says which they are.
LAYERS_TEST = Path(__file__).parent.parent / "tests" / "test_architecture.py"

INK, PALE, PAPER = "#1f2937", "#6b7280", "#ffffff"
RUN, LEASE, GOOD, BAD, BOX = "#2563eb", "#f59e0b", "#15803d", "#b91c1c", "#f3f4f6"
BLUE, YELLOW, GREEN, RED = "#dbeafe", "#fef3c7", "#dcfce7", "#fee2e2"
#: What each color is where the reader's screen is dark.
DARK = {
    INK: "#e5e7eb",
    PALE: "#9ca3af",
    PAPER: "#1a1c1e",
    RUN: "#60a5fa",
    LEASE: "#f59e0b",
    GOOD: "#4ade80",
    BAD: "#f87171",
    BOX: "#2f343b",
    BLUE: "#1e3a5f",
    YELLOW: "#4a3a0c",
    GREEN: "#14432a",
    RED: "#4c1d1d",
}
#: The algorithm, which knows neither a framework nor a server.
LAYER_COLORS = {layer: {"fill": BLUE, "stroke": RUN} for layer in (2, 3)}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@dataclass
class Drawing:
    """A picture under construction; coordinates are pixels from the top left."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle", color: str = INK, style: str = "") -> None:
        # Words that lie on a line hide it; those in a box do not hide the box.
        halo = "" if style else f' stroke="{PAPER}" stroke-width="5" stroke-linejoin="round" paint-order="stroke"'
        for line, words in enumerate(text.split("\n")):
            place = f'x="{x:g}" y="{y + 17 * line:g}" text-anchor="{anchor}"'
            self.parts.append(f'<text {place} fill="{color}"{halo}{style}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, text: str, **colors: str) -> None:
        fill, stroke = colors.get("fill", BOX), colors.get("stroke", PALE)
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}"/>'
        )
        first = y + height / 2 + 5 - 8.5 * text.count("\n")
        self.text(x + width / 2, first, text, style=' font-weight="600"')

    def arrow(self, points: list[tuple[float, float]], *, color: str = INK, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        line = f'stroke="{color}" stroke-width="1.5"{dash} marker-end="url(#{color[1:]})"'
        self.parts.append(f'<polyline points="{path}" fill="none" {line}/>')

    def svg(self) -> str:
        heads = "".join(
            f'<marker id="{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 10 5 0 10z" fill="{color}"/></marker>'
            for color in (INK, PALE, GOOD, BAD)
        )
        dark = "".join(
            f'[fill="{color}"]{{fill:{DARK[color]}}}[stroke="{color}"]{{stroke:{DARK[color]}}}' for color in DARK
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" font-family="{FONT}" font-size="14">\n'
            f"<title>{escape(self.title)}</title>\n"
            f"<style>@media (prefers-color-scheme: dark) {{{dark}}}</style>\n<defs>{heads}</defs>\n"
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>\n{body}\n</svg>\n'
        )


class Sequence:
    """Who tells whom what, from top to bottom."""

    SPACING, TOP, ROW = 178, 56, 44

    def __init__(self, title: str, *lanes: str) -> None:
        self.title, self.lanes = title, lanes
        self.y = self.TOP + 34.0
        self.drawing = Drawing(len(lanes) * self.SPACING + 20, 0, title)
        self.bars: list[tuple[str, float, float, str]] = []
        self.open: dict[tuple[str, str], float] = {}

    def at(self, lane: str) -> float:
        return 10 + self.SPACING * (self.lanes.index(lane) + 0.5)

    def tell(self, sender: str, receiver: str, text: str, *, reply: bool = False, color: str = INK) -> Sequence:
        """Draw an arrow with its words above it."""
        start, end = self.at(sender), self.at(receiver)
        inset = 7 if end > start else -7
        self.y += 17 * text.count("\n")
        self.drawing.text((start + end) / 2, self.y - 7 - 17 * text.count("\n"), text, color=color)
        self.drawing.arrow([(start + inset, self.y), (end - inset, self.y)], color=color, dashed=reply)
        self.y += self.ROW
        return self

    def note(self, lane: str, text: str, *, color: str = INK, left: bool = False) -> Sequence:
        """Write what a lane does by itself, beside it."""
        side = -14 if left else 14
        self.drawing.text(self.at(lane) + side, self.y - 4, text, anchor="end" if left else "start", color=color)
        self.y += self.ROW - 6 + 17 * text.count("\n")
        return self

    def begin(self, lane: str, color: str) -> Sequence:
        """Begin a bar on a lane: a run, or a lease."""
        self.open[lane, color] = self.y - self.ROW + 6
        return self

    def end(self, lane: str, color: str) -> Sequence:
        """End the bar."""
        self.bars.append((lane, self.open.pop((lane, color)), self.y - self.ROW + 6, color))
        return self

    def cross(self, lane: str, text: str) -> Sequence:
        """End a lane's run by force."""
        x, y = self.at(lane), self.y - 12
        self.drawing.parts.append(
            f'<path d="M{x - 9:g} {y - 9:g}l18 18m0 -18l-18 18" stroke="{BAD}" stroke-width="3.5" fill="none"/>'
        )
        self.drawing.text(x + 16, y + 5, text, anchor="start", color=BAD, style=' font-weight="600"')
        self.y += self.ROW - 6
        return self

    def svg(self) -> str:
        done, bottom = Drawing(self.drawing.width, int(self.y) + 4, self.title), self.y - 14
        for lane in self.lanes:
            x = self.at(lane)
            done.parts.append(f'<path d="M{x:g} {self.TOP - 10}V{bottom:g}" stroke="{PALE}" stroke-dasharray="2 4"/>')
            done.box(x - 76, 12, 152, 34, lane)
        for lane, start, end, color in self.bars:
            place = f'x="{self.at(lane) - 6:g}" y="{start:g}" width="12" height="{end - start:g}"'
            done.parts.append(f'<rect {place} rx="3" fill="{color}"/>')
        done.parts += self.drawing.parts
        return done.svg()


def overview() -> str:
    """What a delivery meets, and what it does then."""
    d = Drawing(736, 396, "What a delivery meets in the store, and what happens then")
    d.box(16, 20, 116, 44, "a delivery")
    d.arrow([(132, 42), (156, 42)])
    d.box(158, 20, 190, 44, "key + fingerprint")
    d.arrow([(253, 64), (253, 96)])
    d.box(158, 98, 190, 44, "acquire", fill=BLUE, stroke=RUN)
    d.text(364, 116, "one atomic step in the store:\nthe lease, or the record in the way", anchor="start", color=PALE)
    rows = (
        ("nothing, released,\nor a lease that ran out", "run under a heartbeat,\nthen settle, or release", GOOD),
        ("a live lease", "defer: publish a copy of the message\nwith a delay, then ack this one", INK),
        ("completed", "replay: return the settled result;\nthe body does not run", INK),
    )
    for place, (met, done, color) in enumerate(rows):
        y = 172 + 72 * place
        d.parts.append(f'<path d="M190 142V{y + 28}" stroke="{INK}" stroke-width="1.5"/>')
        d.arrow([(190, y + 28), (208, y + 28)])
        d.box(210, y, 200, 56, met)
        d.arrow([(410, y + 28), (436, y + 28)], color=color)
        d.text(446, y + 25, done, anchor="start", color=color)
    d.text(176, 204, "it meets", anchor="end", color=PALE)
    return d.svg()


def states() -> str:
    """The states of a record."""
    d = Drawing(720, 372, "The states of a record")
    d.box(16, 140, 130, 50, "absent", fill=PAPER)
    d.box(286, 140, 150, 50, "in_progress", fill=YELLOW, stroke=LEASE)
    d.box(560, 40, 140, 50, "completed", fill=GREEN, stroke=GOOD)
    d.box(560, 240, 140, 50, "failed", fill=RED, stroke=BAD)
    d.box(286, 290, 150, 50, "released")
    d.arrow([(146, 165), (284, 165)])
    d.text(214, 155, "acquire")
    d.arrow([(436, 152), (500, 152), (500, 65), (558, 65)], color=GOOD)
    d.text(506, 116, "settle the result", anchor="start", color=GOOD)
    d.arrow([(436, 178), (500, 178), (500, 265), (558, 265)], color=BAD)
    d.text(506, 208, "settle a\nremembered failure", anchor="start", color=BAD)
    d.arrow([(346, 190), (346, 288)])
    d.text(338, 232, "release: failure,\nretry, reject, crash", anchor="end")
    d.arrow([(386, 290), (386, 192)])
    d.text(396, 250, "acquire", anchor="start")
    d.arrow([(330, 140), (330, 100), (392, 100), (392, 138)])
    d.text(361, 76, "renew, while it runs;\ntake over, once it ran out")
    d.arrow([(630, 40), (630, 20), (81, 20), (81, 138)], color=PALE, dashed=True)
    d.text(92, 42, "result_ttl has passed", anchor="start", color=PALE)
    d.arrow([(286, 315), (81, 315), (81, 192)], color=PALE, dashed=True)
    d.parts.append(
        f'<path d="M630 290V358H81V315" fill="none" stroke="{PALE}" stroke-width="1.5" stroke-dasharray="5 4"/>'
    )
    d.text(92, 352, "failure_ttl has passed", anchor="start", color=PALE)
    return d.svg()


def first_run() -> str:
    s = Sequence("A first run, and a duplicate after it", "broker", "worker", "store")
    s.tell("broker", "worker", "message ORD-1").tell("worker", "store", "acquire").begin("store", LEASE)
    s.tell("store", "worker", "the lease, fence 7", reply=True).begin("worker", RUN)
    s.note("worker", "runs the body")
    s.tell("worker", "store", "renew")
    s.note("worker", "has the result").end("worker", RUN)
    s.tell("worker", "store", "settle").end("store", LEASE).tell("worker", "broker", "ack")
    s.tell("broker", "worker", "message ORD-1 again").tell("worker", "store", "acquire")
    s.tell("store", "worker", "completed: result", reply=True, color=GOOD).tell("worker", "broker", "ack")
    return s.svg()


def while_running() -> str:
    s = Sequence("A duplicate meets a live lease and is deferred", "worker A", "store", "worker B", "broker")
    s.tell("worker A", "store", "acquire").begin("store", LEASE).begin("worker A", RUN)
    s.tell("broker", "worker B", "duplicate").tell("worker B", "store", "acquire")
    s.tell("store", "worker B", "held by A", reply=True)
    s.tell("worker B", "broker", "1. publish copy 1, later").tell("worker B", "broker", "2. ack the duplicate")
    s.tell("worker A", "store", "settle").end("store", LEASE).end("worker A", RUN)
    s.tell("broker", "worker B", "copy 1").tell("worker B", "store", "acquire")
    s.tell("store", "worker B", "completed: result", reply=True, color=GOOD).tell("worker B", "broker", "ack")
    return s.svg()


def child_killed() -> str:
    s = Sequence("A child of the worker is killed", "broker", "main process", "store", "child")
    s.tell("broker", "main process", "message").tell("main process", "child", "run it").begin("child", RUN)
    s.tell("child", "store", "acquire").begin("store", LEASE)
    s.cross("child", "kill -9").end("child", RUN)
    s.tell("main process", "store", "release: crashed").end("store", LEASE)
    s.tell("main process", "broker", "put it back").tell("broker", "main process", "message")
    s.tell("main process", "child", "run it, in a new child", color=GOOD).begin("child", RUN)
    s.tell("child", "store", "acquire: at once").end("child", RUN)
    return s.svg()


def worker_killed() -> str:
    s = Sequence("A whole worker dies; its lease runs out", "worker A", "store", "broker", "worker B")
    s.tell("worker A", "store", "acquire").begin("worker A", RUN).begin("store", LEASE)
    s.cross("worker A", "the machine is lost").end("worker A", RUN)
    s.note("broker", "visibility timeout,\nthe message returns")
    s.tell("broker", "worker B", "message").tell("worker B", "store", "acquire: held, so defer")
    s.note("store", "nobody renews:\nthe lease runs out", color=BAD, left=True).end("store", LEASE)
    s.tell("broker", "worker B", "copy 1").tell("worker B", "store", "acquire")
    s.tell("store", "worker B", "the lease, a higher fence:\ntaken over, 1 crash", reply=True, color=GOOD)
    return s.svg()


def paused_holder() -> str:
    s = Sequence("A holder sleeps past its lease and wakes", "worker A", "store", "worker B")
    s.tell("worker A", "store", "acquire: fence 7").begin("worker A", RUN)
    s.note("worker A", "paused, so\nnothing is renewed", color=BAD).end("worker A", RUN)
    s.tell("worker B", "store", "take over: fence 8").begin("worker B", RUN)
    s.tell("worker B", "store", "settle").end("worker B", RUN)
    s.note("worker A", "wakes; its body\nreturns")
    s.tell("worker A", "store", "settle").tell("store", "worker A", "LeaseLost", reply=True, color=BAD)
    s.tell("worker A", "store", "get").tell("store", "worker A", "completed: B's result", reply=True, color=GOOD)
    s.note("worker A", "answers with B's result,\nlike any duplicate", color=GOOD)
    return s.svg()


def retry() -> str:
    s = Sequence("A task retries", "broker", "worker", "store")
    s.tell("broker", "worker", "attempt 0").tell("worker", "store", "acquire").begin("store", LEASE)
    s.note("worker", "retries in 5 s")
    s.tell("worker", "broker", "attempt 1, in 5 s").tell("worker", "store", "release: due in 5 s").end("store", LEASE)
    s.tell("worker", "broker", "ack")
    s.tell("broker", "worker", "a duplicate").tell("worker", "store", "acquire")
    s.tell("store", "worker", "a retry is due: wait", reply=True)
    s.note("worker", "deferred")
    s.tell("broker", "worker", "attempt 1").tell("worker", "store", "acquire: the lease")
    return s.svg()


def store_outage() -> str:
    s = Sequence("The store does not answer", "broker", "worker", "store")
    s.tell("broker", "worker", "message").tell("worker", "store", "acquire", color=BAD).note("store", "down", color=BAD)
    s.note("worker", "holds its slot and asks again,\nafter 0.1 s and growing to 5 s")
    s.tell("worker", "store", "acquire").tell("store", "worker", "the lease", reply=True, color=GOOD)
    s.note("worker", "runs", color=GOOD)
    return s.svg()


def request_to_task() -> str:
    s = Sequence("From the request to the task, and back", "client", "server", "database", "worker")
    s.tell("client", "server", "POST /orders, key K").tell("server", "database", "acquire K").begin("database", LEASE)
    s.begin("server", RUN).note("server", "runs the handler")
    s.tell("server", "database", "commit: the order\nand its response", color=GOOD).end("database", LEASE)
    s.tell("server", "worker", "charge(order), by the broker").end("server", RUN)
    s.tell("server", "client", "202, Location", reply=True, color=BAD)
    s.note("client", "the answer is lost", color=BAD)
    s.tell("client", "server", "POST /orders, key K").tell("server", "database", "acquire K")
    s.tell("database", "server", "completed: 202", reply=True)
    s.tell("server", "client", "202, replayed", reply=True, color=GOOD)
    s.tell("worker", "database", "acquire the order").begin("database", LEASE).begin("worker", RUN)
    s.note("worker", "charges the card,\nkey from the order", left=True)
    s.tell("worker", "database", "commit: the receipt\nand the result", color=GOOD)
    s.end("database", LEASE).end("worker", RUN)
    s.tell("client", "server", "GET /orders/7").tell("server", "client", "charged", reply=True, color=GOOD)
    return s.svg()


def layers() -> str:
    """The layers of the package, as the architecture test has them."""
    found: dict[int, list[str]] = {}
    for statement in ast.parse(LAYERS_TEST.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "LAYERS":
            for name, layer in ast.literal_eval(statement.value).items():
                found.setdefault(layer, []).append(name.replace(".", "/") or "__init__")
    width, height, left = 150, 40, 60
    d = Drawing(left + 5 * (width + 12) + 4, 20 + len(found) * (height + 22), "The layers: imports only point down")
    for place, layer in enumerate(sorted(found, reverse=True)):
        y = 16 + place * (height + 22)
        d.text(34, y + height / 2 + 5, str(layer), color=PALE)
        for column, name in enumerate(found[layer]):
            d.box(left + column * (width + 12), y, width, height, name, **LAYER_COLORS.get(layer, {}))
        if layer:
            d.arrow([(left + width / 2, y + height), (left + width / 2, y + height + 20)], color=PALE)
    return d.svg()


DIAGRAMS = {
    "layers": layers,
    "overview": overview,
    "states": states,
    "first-run": first_run,
    "while-running": while_running,
    "child-killed": child_killed,
    "worker-killed": worker_killed,
    "paused-holder": paused_holder,
    "retry": retry,
    "store-outage": store_outage,
    "request-to-task": request_to_task,
}


def draw() -> None:
    """Write every diagram that has changed."""
    IMAGES.mkdir(exist_ok=True)
    for name, diagram in DIAGRAMS.items():
        path, svg = IMAGES / f"{name}.svg", diagram()
        if not path.exists() or path.read_text(encoding="utf-8") != svg:
            path.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    draw()
