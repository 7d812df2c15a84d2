"""What the roles of the worker contract need in a pod: environment, mounts, helpers."""

from __future__ import annotations

from importer import datavolume, datavolume_pod

#: What the contract calls a source, where it is not as in the API.
SOURCES = {"blank": "none"}
#: The hand-shake of a node pull (contract, Node pull).
SHARED = "/shared"
NODE_PORT = 8100
#: The name that a client's certificate has to have, and where the server's certificates are.
UPLOAD_CLIENT = "uploadclient"
UPLOAD_TLS = "/upload-tls"
UPLOAD_PORT = 8443


def upload(pod: datavolume_pod.Pod) -> datavolume_pod.Object:
    """Return the container of an upload server."""
    secret = {"secret": {"secretName": upload_secret(pod.volume)}}
    pod.mount("tls", UPLOAD_TLS, secret, readOnly=True)
    pod.set(
        TLS_CERT_FILE=f"{UPLOAD_TLS}/tls.crt",
        TLS_KEY_FILE=f"{UPLOAD_TLS}/tls.key",
        CLIENT_CERT_FILE=f"{UPLOAD_TLS}/ca.crt",
        CLIENT_NAME=UPLOAD_CLIENT,
        UPLOAD_IMAGE_SIZE=str(datavolume_pod.claim_size(pod.volume, pod.settings)),
        FILESYSTEM_OVERHEAD=datavolume_pod.decimal(datavolume_pod.overhead(pod.volume, pod.settings)),
        PREALLOCATION=datavolume_pod.boolean(pod.volume.preallocation),
    )
    probe = {"httpGet": {"path": "/healthz", "port": UPLOAD_PORT, "scheme": "HTTPS"}}
    ports = [{"name": "upload", "containerPort": UPLOAD_PORT}]
    return pod.container("uploadserver", ports=ports, readinessProbe=probe)


def upload_secret(volume: datavolume.DataVolume) -> str:
    """Return the name of the Secret with the upload server's certificates, which the user makes."""
    return f"{volume.name}-upload"


def bring(pod: datavolume_pod.Pod) -> datavolume_pod.Object:
    """Return the container of an import, with all that runs before and beside it."""
    source = pod.volume.source
    if source.node_pull:
        _add_node_pull(pod)
    else:
        pod.set(
            IMPORTER_SOURCE=SOURCES.get(source.kind, source.kind),
            IMPORTER_ENDPOINT=source.url,
            IMPORTER_REGISTRY_IMAGE_ARCHITECTURE=source.architecture,
        )
    pod.set(
        IMPORTER_CONTENTTYPE=pod.volume.content_type,
        IMPORTER_IMAGE_SIZE=str(datavolume_pod.claim_size(pod.volume, pod.settings)),
        FILESYSTEM_OVERHEAD=datavolume_pod.decimal(datavolume_pod.overhead(pod.volume, pod.settings)),
        PREALLOCATION=datavolume_pod.boolean(pod.volume.preallocation),
        IMPORTER_CHECKSUM=source.checksum,
        INSECURE_TLS="true" if source.insecure else "",
        IMPORTER_DISK_ID=source.disk_id,
        IMPORTER_UUID=source.uuid,
        IMPORTER_BACKING_FILE=source.backing_file,
        IMPORTER_THUMBPRINT=source.thumbprint,
        **{f"IMPORTER_EXTRA_HEADER_{index}": header for index, header in enumerate(source.headers)},
    )
    # The same for all pods of one job: the next one goes on where the last one was killed.
    label = "metadata.labels['batch.kubernetes.io/controller-uid']"
    pod.set_from("OWNER_UID", {"fieldRef": {"fieldPath": label}})
    _add_secrets(pod)
    if source.kind == "vddk":
        _add_vddk(pod)
    return _staged(pod)


def _add_secrets(pod: datavolume_pod.Pod) -> None:
    source = pod.volume.source
    if source.secret and source.kind == "gcs":
        secret = {"secret": {"secretName": source.secret}}
        pod.mount("credentials", "/google", secret, readOnly=True)
        pod.set(GOOGLE_APPLICATION_CREDENTIALS="/google/credentials.json")
    elif source.secret and not source.node_pull:
        for name, key in (("IMPORTER_ACCESS_KEY_ID", "accessKeyId"), ("IMPORTER_SECRET_KEY", "secretKey")):
            pod.set_from(name, {"secretKeyRef": {"name": source.secret, "key": key}})
        if source.kind == "s3":
            token = {"name": source.secret, "key": "sessionToken", "optional": True}
            pod.set_from("IMPORTER_SESSION_TOKEN", {"secretKeyRef": token})
    if source.certificates and not source.node_pull:
        pod.mount("certs", "/certs", {"configMap": {"name": source.certificates}}, readOnly=True)
        pod.set(IMPORTER_CERT_DIR="/certs")
    for index, name in enumerate(source.secret_headers):
        path = f"{datavolume_pod.PATHS.extra_headers}/{index}"
        pod.mount(f"headers-{index}", path, {"secret": {"secretName": name}}, readOnly=True)


def _add_vddk(pod: datavolume_pod.Pod) -> None:
    source = pod.volume.source
    volume = {"name": "vddk", "mountPath": "/opt"}
    # The image holds the library that nobody may pass on; it copies it into /opt.
    pod.before.append(pod.helper("vddk", source.init_image, volumeMounts=[volume]))
    library = "vmware-vix-disklib-distrib"
    pod.mount("vddk", f"/opt/{library}", {"emptyDir": {}}, subPath=library, readOnly=True)
    if source.extra_arguments:
        arguments = {"configMap": {"name": source.extra_arguments}}
        pod.mount("vddk-args", "/vddk-args", arguments, readOnly=True)


def _add_node_pull(pod: datavolume_pod.Pod) -> None:
    source = pod.volume.source
    ready, done, server = (f"{SHARED}/{name}" for name in ("ready", "done", "server"))
    pod.set(
        IMPORTER_SOURCE="http",
        IMPORTER_ENDPOINT=f"http://localhost:{NODE_PORT}/disk.img",
        IMPORTER_PULL_METHOD="node",
        IMPORTER_READY_FILE=ready,
        IMPORTER_DONE_FILE=done,
    )
    pod.mount("shared", SHARED, {"emptyDir": {"sizeLimit": "64Mi"}})
    shared = [{"name": "shared", "mountPath": SHARED}]
    copy = ["cp", "/usr/bin/cdi-containerimage-server", server]
    pod.before.append(pod.helper("copy-server", pod.settings.image, command=copy, volumeMounts=shared))
    serve = [server, "-p", str(NODE_PORT), "-image-dir", "/disk", "-ready-file", ready, "-done-file", done]
    image = source.image_stream or source.url.removeprefix("docker://")
    pod.beside.append(pod.helper("server", image, command=serve, volumeMounts=shared))
    if source.secret:
        pod.more["imagePullSecrets"] = [{"name": source.secret}]
    if source.architecture:
        pod.more["nodeSelector"] = {"kubernetes.io/arch": source.architecture}
    if source.image_stream:
        pod.annotations["alpha.image.policy.openshift.io/resolve-names"] = "*"


def _staged(pod: datavolume_pod.Pod) -> datavolume_pod.Object:
    """Return the container of the last stage; those before it are containers that run before it."""
    stages = pod.volume.stages_after(pod.settings.after)
    common = pod.env
    for number, stage in enumerate(stages, 1):
        is_last = number == len(stages)
        pod.env = list(common)
        pod.set(
            IMPORTER_PREVIOUS_CHECKPOINT=stage.previous,
            IMPORTER_CURRENT_CHECKPOINT=stage.current,
            IMPORTER_FINAL_CHECKPOINT=datavolume_pod.boolean(is_last and pod.volume.final),
        )
        if not is_last:
            pod.before.append(pod.container(f"stage-{number}"))
    ports = [{"name": "metrics", "containerPort": datavolume_pod.PATHS.metrics_port}]
    return pod.container("importer", ports=ports)
