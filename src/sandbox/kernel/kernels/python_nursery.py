# An interpreter that others are cast from: loaded, warm, with nothing of anybody's. Follows `python_once.py`.


def grow():
    """In each that is cast: what the fork of one process does not make anew, and then the one piece."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1)
    length, mark, _ = line.decode().split()
    connect(mark)
    settings = loads(CHANNEL.read(int(length)))
    os.environ["PWD"] = os.getcwd()
    os.environ.update(settings["env"])
    # The kernel knows of no handlers in a process that was cast.
    for number in range(1, signal.NSIG):
        handler = signal.getsignal(number) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
        if handler not in (None, signal.SIG_DFL):
            signal.signal(number, handler)
    # Packages that have come since, where the user puts them.
    site = sys.modules.get("site")
    if site is not None and site.ENABLE_USER_SITE and site.USER_SITE not in sys.path and os.path.isdir(site.USER_SITE):
        site.addsitedir(site.USER_SITE)
    once()


def nursery():
    import collections, datetime, math, random, re, subprocess  # noqa: for those that are cast, so that they need not

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for _ in range(3):
        rehearse()
    gc.collect()
    gc.freeze()
    CHANNEL.send({"ready": {"version": sys.version.split()[0]}})
    # Told to fork, and from here on with no descriptor but three.
    CHANNEL.read(1)
    for fd, own in enumerate((CHANNEL.requests, CHANNEL.out, CHANNEL.err)):
        os.dup2(own, fd)
        os.close(own)
    if os.fork() == 0:
        grow()
    time.sleep(60)


nursery()
