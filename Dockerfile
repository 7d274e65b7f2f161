# One image for relay, backbone and node; docker-compose.yml chooses the command.
# /cache can be made anew; /state holds keys and tokens: on a volume, or a new container is another peer.
FROM python:3.13-slim
COPY . /src
RUN pip install --no-cache-dir /src && rm -rf /src && mkdir /cache /state && chown nobody /cache /state
USER nobody
ENV HOME=/tmp XDG_CACHE_HOME=/cache XDG_STATE_HOME=/state
VOLUME ["/cache", "/state"]
