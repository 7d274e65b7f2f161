"""`expert-node`, `python -m backbone.node`: from the first moment on, Ctrl-C ends it without a traceback."""

import signal


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the program listens itself: imports take a while
    from backbone.node import cli
    from relay.program.running import leave

    leave(cli.main())


if __name__ == "__main__":
    main()
