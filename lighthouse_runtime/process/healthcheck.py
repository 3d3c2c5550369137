"""`python -m lighthouse_runtime.process.healthcheck`: whether a daemon in this container lives, for its image.

It asks /livez on port 29511, by HTTPS and by HTTP: which one a daemon serves depends on its options, and who answers
does not matter on a loopback.
"""

import http.client
import ssl
import sys

from lighthouse_protocol.limits import LIGHTHOUSE_HTTP_PORT

_TIMEOUT_S = 1.0


def is_alive(host: str = "127.0.0.1", port: int = LIGHTHOUSE_HTTP_PORT) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for connection in (
        http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context),
        http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S),
    ):
        try:
            connection.request("GET", "/livez")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return False


if __name__ == "__main__":
    sys.exit(0 if is_alive() else 1)
