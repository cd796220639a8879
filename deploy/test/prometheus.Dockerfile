# Debian's Prometheus in an image that takes the same arguments as the one of its makers. Context: the unpacked package.
ARG BASE
FROM ${BASE}
COPY usr/ /usr/
RUN install -d -o nobody /prometheus
USER nobody
VOLUME /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
