"""Runs Python code for the host: cells of a kernel that keeps its state, or one piece in a fresh process.

Speaks what `frame.rs` describes: requests come over the descriptor that was standard input; messages go, marked, into
standard output and standard error, between what the code itself writes there. No write is longer than PIPE_BUF, so
threads and subprocesses of the code can write at any time. Needs Python 3.8 and its standard library, nothing else.

`ARGS` (from the start text) are the mark and the mode: `kernel`, `once` (one piece, then end) or `zygote` (forks one
child ahead for each piece). This text is what all modes need; the text of the mode follows it, as an interpreter that is
waited for should not read what it has no use for.
"""
import sys

# What the user's directory holds is the user's: not one module of it is taken for the driver's own.
_first = sys.path[:1]
if _first == [""]:
    del sys.path[0]
import ast
import atexit
import binascii
import builtins
import fcntl
import gc
import io
import linecache
import os
import select
import signal
import threading
import time
import traceback
import types
import resource

# Kept under names of our own, whatever the code makes of the module.
from json import dumps, loads

sys.path[:0] = _first

# Payload of one write: with mark and head it stays below PIPE_BUF (4096).
PART = 4000
MAX_TEXT = 1 << 20
MAX_DATA = 8 << 20
MAX_ERROR = 128 << 10
# A worker's exit code for "no request came"; see `zygote`.
NO_REQUEST = 64


def away(fd):
    """A copy of `fd` that no program inherits, out of the way of low numbers."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 120)
    except OSError:
        return os.dup(fd)


def write_all(fd, data):
    while True:
        try:
            # Up to PIPE_BUF it is all or nothing, even when the code has made the pipe non-blocking.
            os.write(fd, data)
            return
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
        except OSError:
            # The code has closed it: there is no way left to say anything.
            os._exit(70)


class Channel:
    def __init__(self, requests, out, err):
        self.requests, self.out, self.err = requests, out, err
        self.lock = threading.Lock()

    def send(self, message, fd=None):
        data = dumps(message).encode()
        with self.lock:
            first, at = 1, 0
            while True:
                part = data[at : at + PART]
                at += PART
                last = at >= len(data)
                head = b"%d%04x" % (first | (2 if last else 0), len(part))
                write_all(self.out if fd is None else fd, MARK + head + part)
                if last:
                    return
                first = 0

    def read(self, length):
        parts = []
        while length:
            try:
                part = os.read(self.requests, length)
            except OSError:
                os._exit(70)
            if not part:
                return None
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def request(self):
        """The next one as (number, code, settings); None when there will be none."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self.read(1)
            if byte is None:
                return None
            line += byte
        _, number, code, settings = line.split()
        code, settings = self.read(int(code)), self.read(int(settings))
        if code is None or settings is None:
            return None
        return int(number), code.decode(), loads(settings)


def clean(text, limit=MAX_ERROR):
    """Text that JSON can carry, of bounded length."""
    text = text.encode("utf-8", "backslashreplace")
    if len(text) > limit:
        text = text[: limit // 2] + b"\n[... left out ...]\n" + text[-limit // 2 :]
    return text.decode("utf-8", "replace")


# --- what a value looks like

REPRS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"),
    ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
)


def as_bytes(mime, value):
    """One representation as bytes; None for what is none."""
    if isinstance(value, tuple) and len(value) == 2:
        value = value[0]  # (data, metadata)
    if value is None:
        return None
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if mime == "application/json" or mime.endswith("+json"):
        return dumps(value).encode()
    if not isinstance(value, str):
        return None
    if (mime.startswith("image/") and mime != "image/svg+xml") or mime == "application/pdf":
        return binascii.a2b_base64(value)
    return value.encode("utf-8", "surrogateescape" if mime == "text/plain" else "backslashreplace")


def is_figure(value):
    figures = sys.modules.get("matplotlib.figure")
    return isinstance(value, getattr(figures, "Figure", ()))


def draw(figure):
    data = {"text/plain": repr(figure).encode()}
    for mime, kind in (("image/png", "png"), ("image/svg+xml", "svg")):
        if kind in os.environ.get("EXUVIA_FIGURES", "png").split(","):
            file = io.BytesIO()
            figure.savefig(file, format=kind, bbox_inches="tight")
            data[mime] = file.getvalue()
    return data


def representations(value):
    if is_figure(value):
        return draw(value)
    data, kind = {}, type(value)
    if kind is type:
        return {"text/plain": as_bytes("text/plain", repr(value))}
    # Looked up on the type: an object that answers to every name has none of these.
    bundle = getattr(kind, "_repr_mimebundle_", None)
    if bundle is not None:
        try:
            made = bundle(value, include=None, exclude=None)
            made = made[0] if isinstance(made, tuple) else made
            for mime, item in made.items():
                data[str(mime)] = as_bytes(str(mime), item)
        except Exception:
            data = {}
    for name, mime in REPRS:
        method = getattr(kind, name, None)
        if method is not None and mime not in data:
            try:
                data[mime] = as_bytes(mime, method(value))
            except Exception:
                # One that fails is left out, as a notebook does.
                pass
    data = {mime: item for mime, item in data.items() if item is not None}
    if "text/plain" not in data:
        data["text/plain"] = as_bytes("text/plain", repr(value))
    return data


def packed(data):
    """Representations as base64, without those that are too large: the text says which."""
    text = data.pop("text/plain", b"")
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + b"\n[... %d of %d bytes left out]" % (len(text) - MAX_TEXT, len(text))
    left, kept = MAX_DATA, {}
    for mime, item in data.items():
        if len(item) <= left:
            left -= len(item)
            kept[mime] = item
        else:
            text += b"\n[%s of %d bytes left out: too large]" % (mime.encode(), len(item))
    kept["text/plain"] = text
    return {mime: binascii.b2a_base64(item, newline=False).decode() for mime, item in kept.items()}


class Show:
    """What the code can show: the value of a cell, what it displays, its open figures."""

    def __init__(self, channel):
        self.channel = channel
        self.process = os.getpid()

    def value(self, value):
        builtins._ = value
        self.send(representations(value), True)
        if is_figure(value):
            plot = sys.modules.get("matplotlib.pyplot")
            if plot is not None:
                plot.close(value)

    def display(self, *values, include=None, exclude=None, metadata=None, transient=None, display_id=None, raw=False, **rest):
        for value in values:
            if raw:
                data = {mime: as_bytes(mime, item) for mime, item in value.items()}
                self.send({mime: item for mime, item in data.items() if item is not None}, False)
            else:
                self.send(representations(value), False)

    def send(self, data, main):
        if os.getpid() != self.process:
            # A fork of the code's own: it has no place among the results, but may print.
            print(data.get("text/plain", b"").decode("utf-8", "surrogateescape"))
            return
        # What was printed before comes before.
        flush()
        self.channel.send({"result": {"data": packed(data), "main": main}})

    def figures(self):
        plot = sys.modules.get("matplotlib.pyplot")
        if plot is None or os.getpid() != self.process:
            return
        try:
            for number in plot.get_fignums():
                self.send(draw(plot.figure(number)), False)
        finally:
            plot.close("all")


class Hook:
    """Makes `pyplot.show()` and IPython's `display()` ours when, and only when, the code imports them."""

    def __init__(self):
        # A plain function: matplotlib sets attributes on it.
        def show_figures(*_, **__):
            SHOW.figures()

        self.after = {
            "matplotlib.pyplot": lambda module: setattr(module, "show", show_figures),
            "IPython.core.display_functions": lambda module: setattr(module, "display", SHOW.display),
        }

    def find_spec(self, name, path=None, target=None):
        after = self.after.pop(name, None)
        if after is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                break
        else:
            return None
        run = getattr(spec.loader, "exec_module", None)
        if run is not None:

            def exec_module(module):
                run(module)
                after(module)

            try:
                spec.loader.exec_module = exec_module
            except AttributeError:
                pass
        return spec


# --- running code


def flush():
    for stream in {sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__}:
        try:
            stream.flush()
        except Exception:
            pass


def open_streams():
    """Standard streams as the code should find them, even if it has closed them before."""
    try:
        os.fstat(0)
    except OSError:
        null = os.open(os.devnull, os.O_RDONLY)
        if null != 0:
            os.dup2(null, 0)
            os.close(null)
    if getattr(sys.stdin, "closed", True):
        sys.stdin = sys.__stdin__ = open(0, closefd=False)
    for name, fd, kept in (("stdout", 1, CHANNEL.out), ("stderr", 2, CHANNEL.err)):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(kept, fd)
        stream = getattr(sys, name)
        if getattr(stream, "closed", stream is None):
            errors = "surrogateescape" if fd == 1 else "backslashreplace"
            stream = io.TextIOWrapper(open(fd, "wb", closefd=False), "utf-8", errors, line_buffering=True)
            setattr(sys, name, stream)
            setattr(sys, "__%s__" % name, stream)


AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80
FUTURE = 0x1FF0000


class Cells:
    """Runs pieces of code in one `__main__`."""

    def __init__(self, show):
        self.show = show
        self.loop = None
        self.future = 0
        self.fresh_main()

    def fresh_main(self):
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        self.names = main.__dict__

    def compile(self, tree, name, mode):
        code = compile(tree, name, mode, flags=AWAIT | self.future, dont_inherit=True)
        self.future |= code.co_flags & FUTURE
        return code

    def step(self, code):
        value = eval(code, self.names)
        if code.co_flags & COROUTINE:
            value = self.wait(value)
        return value

    def wait(self, coroutine):
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                self.loop.run_until_complete(asyncio.wait([task], timeout=1))
            raise

    def run(self, text, name):
        lines = text.splitlines(True)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"  # as in a file: `traceback` counts on it where it puts its carets
        linecache.cache[name] = (len(text), None, lines, name)
        tree = ast.parse(text, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not text.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)
        if tree.body:
            code = self.compile(tree, name, "exec")
            if last is not None:
                last = self.compile(last, name, "eval")
            self.step(code)
        elif last is not None:
            last = self.compile(last, name, "eval")
        if last is not None:
            value = self.step(last)
            if value is not None:
                self.show.value(value)


def told(error):
    """An exception as the code's own frames show it."""
    # Frames above the code's own (this driver's, the event loop's, the parser's) are none of the user's.
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(("<cell ", "<string>")):
        trace = trace.tb_next
    try:
        value = str(exit_code(error)[0]) if isinstance(error, SystemExit) and not error.args else str(error)
    except Exception:
        value = "<its text cannot be made>"
    try:
        lines = traceback.format_exception(type(error), error, trace)
    except Exception:
        lines = ["%s: %s\n" % (type(error).__name__, value)]
    return {"name": clean(type(error).__name__), "value": clean(value), "traceback": clean("".join(lines))}


def exit_code(error):
    """The exit status that Python gives to this SystemExit, and what it prints."""
    code = error.code
    if code is None:
        return 0, None
    if isinstance(code, int):
        return code & 0xFF, None
    return 1, code


def leave_fork(error):
    """A fork of the code's own came to the end of the code: it ends as a program would, and says nothing to the host."""
    status = 0
    if isinstance(error, SystemExit):
        status, text = exit_code(error)
        if text is not None:
            print(text, file=sys.stderr)
    elif error is not None:
        sys.stderr.write(told(error)["traceback"])
        status = 1
    flush()
    os._exit(status)


if sys.version_info < (3, 8):
    os.write(2, b"this needs Python 3.8 or later\n")
    os._exit(78)


def connect(mark):
    """Makes the three descriptors that every program has the way to the host, and gives the code others in their place."""
    global MARK, CHANNEL, SHOW
    MARK = b"\x1e" + mark.encode() + b":"
    CHANNEL = Channel(away(0), away(1), away(2))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    SHOW = Show(CHANNEL)
    builtins.display = SHOW.display


connect(ARGS[0])
sys.stdout.reconfigure(line_buffering=True, errors="surrogateescape")
sys.argv[:] = ["-c"]
os.environ.setdefault("MPLBACKEND", "agg")
sys.meta_path.insert(0, Hook())
