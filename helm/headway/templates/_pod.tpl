{{/*
The pod of a component, the same for all: dict "root" "name" "component", and from whoever starts it otherwise "command",
"args" and "environment" (lists). What differs stands in the table of components and in values.yaml.
*/}}
{{- define "headway.pod" -}}
{{- $values := index .root.Values .component.values -}}
{{- $isOurs := ne .name "etcd" -}}
metadata:
  labels:
    {{- include "headway.selector" . | nindent 4 }}
    {{- with $values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    {{- if $isOurs }}
    checksum/experiment: {{ include "headway.checksum" .root }}
    {{- end }}
    {{- with $values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "headway.fullname" .root }}-{{ .name }}
  {{- include "headway.sealed" (dict "root" .root "seccompProfile" $values.seccompProfile) | nindent 2 }}
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  {{- include "headway.placing" . | nindent 2 }}
  containers:
    - name: {{ .name }}
      image: {{ include "headway.image" (dict "root" .root "image" $values.image) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      {{- with .command }}
      command: {{- toYaml . | nindent 8 }}
      {{- end }}
      args:
        {{- with .args }}{{ toYaml . | nindent 8 }}{{ end }}
        {{- if $isOurs }}{{ include "headway.overrides" .root | nindent 8 }}{{ end }}
        {{- with $values.args }}{{ toYaml . | nindent 8 }}{{ end }}
      env:
        {{- if $isOurs }}{{ include "headway.environment" . | nindent 8 }}{{ end }}
        {{- with .environment }}{{ toYaml . | nindent 8 }}{{ end }}
        {{- range $name, $value := $values.env }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
        {{- range $name, $from := $values.secretEnv }}
        - {name: {{ $name }}, valueFrom: {secretKeyRef: {name: {{ $from.secret }}, key: {{ $from.key }}}}}
        {{- end }}
      ports:
        {{- range $name, $port := .component.ports }}
        - {name: {{ $name }}, containerPort: {{ int $port }}, protocol: TCP}
        {{- end }}
      {{- include "headway.probes" . | nindent 6 }}
      {{- with $values.preStopSeconds }}
      lifecycle: {preStop: {exec: {command: [sleep, {{ . | quote }}]}}}
      {{- end }}
      resources: {{- toYaml $values.resources | nindent 8 }}
      {{- include "headway.confined" . | nindent 6 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts: {{- include "headway.mounts" . | nindent 8 }}
  volumes: {{- include "headway.volumes" . | nindent 4 }}
{{- end -}}

{{/* What the restricted Pod Security Standard asks of a pod, and how its image is fetched: dict "root" "seccompProfile". */}}
{{- define "headway.sealed" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {{- toYaml .seccompProfile | nindent 4 }}
{{- end -}}

{{/* What it asks of a container. */}}
{{- define "headway.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where the pod may go. */}}
{{- define "headway.placing" -}}
{{- $values := index .root.Values .component.values -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ $values.spread }}
    labelSelector: {{ include "headway.matching" . }}
{{- range $key := list "runtimeClassName" "priorityClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with index $values $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What headway/runtime/service.py reads. */}}
{{- define "headway.environment" -}}
- {name: HEADWAY_CONFIG, value: /headway/configs/experiment.yaml}
- {name: HEADWAY_INSTANCE, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: HEADWAY_ADVERTISE, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- range $name, $port := pick .component.ports "grpc" "http" "metrics" }}
- {name: HEADWAY_{{ upper $name }}_PORT, value: {{ int $port | quote }}}
{{- end }}
{{- if eq .name "rollout-controller" }}{{ include "headway.access" .root | nindent 0 }}{{ end }}
{{- if ne .name "name-resolve" }}
- {name: HEADWAY_NAME_RESOLVE, value: "{{ include "headway.fullname" .root }}-name-resolve.{{ .root.Release.Namespace }}.svc:7000"}
{{- else if .root.Values.externalEtcd.passwordSecret.name }}
- {name: HEADWAY_ETCD_PASSWORD, valueFrom: {secretKeyRef: {{ toJson .root.Values.externalEtcd.passwordSecret }}}}
{{- end }}
{{- end -}}

{{/* Who may ask the rollout-controller: services/rollout_controller/auth.py. */}}
{{- define "headway.access" -}}
{{- with .Values.api.tokenSecret -}}
{{- if .name -}}
- {name: HEADWAY_API_TOKEN, valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}}
{{- else -}}
- {name: HEADWAY_API_PUBLISHED_ON, value: 127.0.0.1}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Startup, readiness, liveness. Our services say by the gRPC health protocol that they serve; the inference agent only when it is
registered with the published version. Clusters before 1.24 cannot ask that: there the image asks itself whether it is ready,
which costs a process each time, and is alive while it listens. So is etcd, which is ready when it has a leader: restarting it
mends no lost quorum.
*/}}
{{- define "headway.probes" -}}
{{- $values := index .root.Values .component.values -}}
{{- $ready := dict "grpc" (dict "port" 7000) -}}
{{- $alive := $ready -}}
{{- $period := 10 -}}
{{- if eq .name "etcd" -}}
{{- $ready = dict "httpGet" (dict "path" "/health" "port" "client") -}}
{{- $alive = dict "tcpSocket" (dict "port" "client") -}}
{{- else if semverCompare "<1.24-0" .root.Capabilities.KubeVersion.Version -}}
{{- $ready = dict "exec" (dict "command" (list "/opt/headway/bin/python" "-m" "headway.runtime.probe" "127.0.0.1:7000")) -}}
{{- $alive = dict "tcpSocket" (dict "port" "grpc") -}}
{{- $period = 20 -}}
{{- end -}}
startupProbe:
  {{- toYaml $alive | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add $values.startupSeconds 4) 5 }}
readinessProbe:
  {{- toYaml $ready | nindent 2 }}
  periodSeconds: {{ $period }}
  timeoutSeconds: {{ $period }}
{{- if $values.liveness }}
livenessProbe:
  {{- toYaml $alive | nindent 2 }}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}
{{- end -}}

{{/* Each volume where the images expect it: see the head of docker/Dockerfile. */}}
{{- define "headway.mounts" -}}
{{- $component := .component -}}
- {name: tmp, mountPath: /tmp}
{{- if (index .root.Values $component.values).shmSize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if eq .name "etcd" }}
- {name: data, mountPath: /data}
{{- else }}
- {name: experiment, mountPath: /headway/configs, readOnly: true}
{{- end }}
{{- range $component.volumes }}
{{- if eq . "weights" }}
- {name: weights, mountPath: /headway/runs/weights, readOnly: {{ $component.weightsReadOnly | default false }}}
{{- else if hasKey ($component.folders | default dict) . }}
{{- $volume := . }}
{{- range index $component.folders $volume }}
- {name: {{ $volume }}, mountPath: /headway/runs/{{ . }}, subPath: {{ . }}}
{{- end }}
{{- else }}
- {name: {{ . }}, mountPath: /headway/{{ . }}, readOnly: {{ eq . "models" }}}
{{- end }}
{{- end }}
{{- if and (eq .name "name-resolve") .root.Values.externalEtcd.tlsSecret }}
- {name: etcd-tls, mountPath: /etc/headway/etcd, readOnly: true}
{{- end }}
{{- end -}}

{{- define "headway.volumes" -}}
{{- $root := .root -}}
- {name: tmp, emptyDir: {}}
{{- with (index .root.Values .component.values).shmSize }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
{{- end }}
{{- if ne .name "etcd" }}
- name: experiment
  configMap:
    name: {{ include "headway.fullname" $root }}-experiment
    items:
      - {key: experiment.yaml, path: experiment.yaml}
      {{- range $path := include "headway.modelFiles" $root | fromYamlArray }}
      - {key: {{ $path | replace "/" "." }}, path: {{ $path }}}
      {{- end }}
{{- end }}
{{- range .component.volumes }}
{{- if eq . "runs" }}
- {name: runs, emptyDir: {}}
{{- else }}
{{- $claim := index $root.Values.persistence . }}
{{- if $claim.existingClaim }}
- {name: {{ . }}, persistentVolumeClaim: {claimName: {{ $claim.existingClaim }}}}
{{- else if has . (list "weights" "journal" "checkpoints") }}
- {name: {{ . }}, persistentVolumeClaim: {claimName: {{ include "headway.fullname" $root }}-{{ . }}}}
{{- else }}
- {name: {{ . }}, emptyDir: { {{- with $claim.sizeLimit }}sizeLimit: {{ . }}{{ end -}} }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq .name "name-resolve") .root.Values.externalEtcd.tlsSecret }}
- {name: etcd-tls, secret: {secretName: {{ .root.Values.externalEtcd.tlsSecret }}, defaultMode: 288}}
{{- end }}
{{- end -}}
