"""Say why a port cannot be had: which one, and what to do."""

import errno
import socket


def cannot_listen(what: str, host: str, port: int, exc: OSError, kind: str = "tcp") -> str:
    """One line: `cannot listen on 0.0.0.0:8765 (page): another program has the port …`."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    match exc.errno:
        case errno.EADDRINUSE:
            why = f"the port is in use; choose another, or see who has it: ss -l{kind[0]}np 'sport = {port}'"
        case errno.EACCES | errno.EPERM:
            why = "ports below 1024 need rights this program does not have; choose a higher one"
        case errno.EADDRNOTAVAIL:
            why = "this machine has no such address; 0.0.0.0 means all it has"
        case _ if isinstance(exc, socket.gaierror):
            why = "there is no such name; 0.0.0.0 means all addresses of this machine"
        case _:
            why = exc.strerror or str(exc)
    return f"cannot listen on {where} ({what}): {why}"
