{{- define "p2p.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{/* The headless service whose name means every proxy. */}}
{{- define "p2p.proxies" -}}
{{ .Release.Name }}-proxies
{{- end }}

{{- define "p2p.transferConfig" -}}
{{- $ours := dict "proxy_ip" (include "p2p.proxies" .root) "proxy_port" 30001 "http_port" (int .role.port)
      "send_type" .root.Values.sendType "key_file" "/etc/p2p-engine/fleet.key" -}}
{{- $extra := merge (deepCopy .root.Values.instance.connector) $ours -}}
{{- dict "kv_connector" "P2pNcclConnector" "kv_role" .kvRole "kv_port" (int .role.kvPort)
      "kv_connector_extra_config" $extra | toJson -}}
{{- end }}

{{- define "p2p.eventsConfig" -}}
{{- dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" (printf "tcp://*:%d" (int .role.eventsPort))
      "replay_endpoint" (printf "tcp://*:%d" (add .role.eventsPort 500)) | toJson -}}
{{- end }}

{{/* One pod of an instance. `node` is "" where it is the only one, else "leader" or "worker". */}}
{{- define "p2p.instancePod" -}}
{{- $values := .root.Values -}}
{{- $size := mul .role.gpus .role.hosts -}}
metadata:
  labels: {{- include "p2p.labels" (dict "name" "p2p-instance" "component" .name "root" .root) | nindent 4 }}
spec:
  terminationGracePeriodSeconds: {{ add $values.drainSeconds 30 }}
  {{- if $values.instance.shareHost }}
  hostNetwork: true
  hostIPC: true
  hostPID: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 0
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.instance.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.instance.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: instance
      image: {{ $values.image.instance }}
      command: [vllm, serve]
      args:
        - {{ $values.model }}
        - --port={{ .role.port }}
        - --shutdown-timeout=12
        - --tensor-parallel-size={{ $size }}
        {{- if .node }}
        - --nnodes={{ .role.hosts }}
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        {{- end }}
        {{- if eq .node "worker" }}
        - --headless
        {{- end }}
        - '--kv-transfer-config={{ include "p2p.transferConfig" . }}'
        {{- if $values.kvEvents.enabled }}
        - '--kv-events-config={{ include "p2p.eventsConfig" . }}'
        {{- end }}
        {{- range concat $values.instance.arguments .role.arguments }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: VLLM_HOST_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: HF_HOME
          value: /models
        {{- with $values.hubSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
        {{- end }}
        {{- with $values.instance.environment }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: http, containerPort: {{ .role.port }}}
        - {name: kv, containerPort: {{ .role.kvPort }}}
        {{- if $values.kvEvents.enabled }}
        - {name: kv-events, containerPort: {{ .role.eventsPort }}}
        - {name: kv-replay, containerPort: {{ add .role.eventsPort 500 }}}
        {{- end }}
      {{- if ne .node "worker" }}
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        failureThreshold: 180
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      lifecycle:
        preStop:
          exec:
            command:
              - sh
              - -c
              - >-
                exec p2p-engine drain --proxy={{ include "p2p.proxies" .root }}:10001
                --instance="$VLLM_HOST_IP:{{ .role.port }}"
                --admin-key-file=/etc/p2p-engine/admin.key --timeout={{ $values.drainSeconds }}
      {{- end }}
      resources:
        requests: {{- toYaml $values.instance.resources.requests | nindent 10 }}
        limits:
          {{- merge (dict $values.instance.gpu .role.gpus) $values.instance.rdma $values.instance.resources.limits
                | toYaml | nindent 10 }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
      volumeMounts:
        - {name: keys, mountPath: /etc/p2p-engine, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
        - {name: models, mountPath: /models}
  volumes:
    - name: keys
      secret: {secretName: {{ $values.keySecret }}, defaultMode: 0440}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.instance.shmSize }}}
    - name: models
      {{- toYaml $values.instance.models | nindent 6 }}
{{- end }}
