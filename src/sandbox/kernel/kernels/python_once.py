# An interpreter for one piece. Follows `python_piece.py`.


def once():
    CHANNEL.send({"ready": {"version": sys.version.split()[0]}})
    piece = CHANNEL.request()
    if piece is None:
        os._exit(NO_REQUEST)
    os.close(CHANNEL.requests)
    os._exit(one_piece(piece))


if ARGS[1] == "once":
    once()
