# Cells of a kernel that keeps its state. Follows `python.py`.


def set_environment(changes):
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    return before


def restore_environment(before):
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def idle(*_):
    """SIGINT while no code runs means nothing."""


def kernel():
    cells, handler, process = Cells(SHOW), signal.default_int_handler, os.getpid()
    signal.signal(signal.SIGINT, idle)
    CHANNEL.send({"ready": {"version": sys.version.split()[0]}})
    while True:
        request = CHANNEL.request()
        if request is None:
            os._exit(0)
        number, text, settings = request
        before = set_environment(settings.get("env", {}))
        error = None
        try:
            try:
                open_streams()
                signal.signal(signal.SIGINT, handler)
                cells.run(text, "<cell %d>" % number)
            except BaseException as caught:
                error = caught
            finally:
                handler = signal.getsignal(signal.SIGINT)
                signal.signal(signal.SIGINT, idle)
        except KeyboardInterrupt as caught:
            # It came between the two lines above.
            error = caught
            handler = signal.default_int_handler
            signal.signal(signal.SIGINT, idle)
        if os.getpid() != process:
            leave_fork(error)
        restore_environment(before)
        try:
            SHOW.figures()
        except Exception as caught:
            error = error or caught
        flush()
        if error is not None:
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            CHANNEL.send({"error": told(error)})
        CHANNEL.send({"sync": number}, CHANNEL.err)
        CHANNEL.send({"end": {"number": number, "ok": error is None, "interrupted": isinstance(error, KeyboardInterrupt)}})
        error = None


kernel()
