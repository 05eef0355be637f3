# One piece of code in this process. Follows `python.py`.


def join_threads():
    """What `threading` does at the end of the interpreter, with nothing that can be done only once."""
    for call in reversed(getattr(threading, "_threading_atexits", ())):
        call()
    while True:
        others = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
        if not others:
            return
        others[0].join()


def finish_process():
    """What Python does at its end, up to the point where nothing of the user's runs any more."""
    for step in (join_threads, atexit._run_exitfuncs):
        try:
            step()
        except BaseException as error:
            sys.stderr.write(told(error)["traceback"])


def one_piece(request, finish=finish_process):
    """Runs code as `python3 -c` would, tells the end, and returns."""
    number, text, settings = request
    process = os.getpid()
    os.environ.update(settings.get("env", {}))
    SHOW.process = process
    cells = Cells(SHOW)
    error, status = None, 0
    try:
        cells.run(text, "<string>")
    except BaseException as caught:
        error = caught
    if os.getpid() != process:
        leave_fork(error)
    if isinstance(error, SystemExit):
        status, shown = exit_code(error)
        if shown is not None:
            print(shown, file=sys.stderr)
        error = None
    elif isinstance(error, KeyboardInterrupt):
        status = 130
    elif error is not None:
        status = 1
    try:
        SHOW.figures()
    except Exception as caught:
        error, status = error or caught, status or 1
    if error is not None:
        flush()
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, error.__traceback__)
        CHANNEL.send({"error": told(error)})
        error.__traceback__ = None
    finish()
    # Objects that say goodbye do it now.
    cells.names.clear()
    flush()
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int((used.ru_utime + used.ru_stime) * 1e6)
    CHANNEL.send({"sync": number}, CHANNEL.err)
    CHANNEL.send({
        "end": {
            "number": number,
            "ok": status == 0,
            "interrupted": isinstance(error, KeyboardInterrupt),
            "status": status,
            "cpu_us": cpu,
            "max_rss_bytes": used.ru_maxrss * 1024,
        }
    })
    return status


def rehearse():
    """Runs a piece for nobody, so that the pages it takes are this process's own before it matters."""
    global CHANNEL
    real, streams = CHANNEL, (sys.stdout, sys.stderr)
    null = os.open(os.devnull, os.O_RDWR)
    CHANNEL = Channel(null, null, null)
    SHOW.channel = CHANNEL
    sys.stdout = open(null, "w", closefd=False)
    names = set(vars(builtins))
    try:
        one_piece((0, "import os\ndef f(x):\n    return [x * i for i in range(20)]\nprint(f(3), sum(f(4)))\nf(2)", {"env": {}}), lambda: None)
    finally:
        sys.stdout.close()
        CHANNEL, (sys.stdout, sys.stderr) = real, streams
        SHOW.channel = CHANNEL
        os.close(null)
        linecache.cache.clear()
        for name in set(vars(builtins)) - names:
            delattr(builtins, name)
