# One image for relay, backbone and node; docker-compose.yml chooses the command.
FROM python:3.13-slim
COPY . /src
RUN pip install --no-cache-dir /src && rm -rf /src && mkdir /cache && chown nobody /cache
USER nobody
ENV HOME=/tmp XDG_CACHE_HOME=/cache
