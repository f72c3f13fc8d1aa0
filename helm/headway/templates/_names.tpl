{{/* The words that all objects share. `root` is the chart's context. */}}

{{- define "headway.fullname" -}}
{{- $default := ternary .Release.Name (printf "%s-headway" .Release.Name) (contains "headway" .Release.Name) -}}
{{- .Values.fullnameOverride | default $default | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of a component's objects: dict "root" "name". */}}
{{- define "headway.labels" -}}
{{ include "headway.selector" . }}
app.kubernetes.io/version: {{ .root.Values.image.tag | default .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "headway.selector" -}}
app.kubernetes.io/name: headway
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{/* The same, to select by. */}}
{{- define "headway.matching" -}}
{{ dict "matchLabels" (include "headway.selector" . | fromYaml) | toJson }}
{{- end -}}

{{/* An object's name and labels: dict "root" "name". */}}
{{- define "headway.metadata" -}}
name: {{ include "headway.fullname" .root }}-{{ .name }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "headway.labels" . | nindent 2 }}
{{- end -}}

{{/* dict "root" "image": a target of docker/Dockerfile, or a whole name with a slash in it. */}}
{{- define "headway.image" -}}
{{- if contains "/" .image -}}
{{ .image }}
{{- else -}}
{{ .root.Values.image.prefix }}/{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The experiment file, word for word. */}}
{{- define "headway.experiment" -}}
{{- $file := printf "configs/%s" .Values.experiment.file -}}
{{- .Values.experiment.content | default (.Files.Get $file) | required (printf "experiment.file: the chart has no %s; give your own with --set-file experiment.content=FILE" $file) -}}
{{- end -}}

{{/* What the chart sets in the experiment file: where things are here, then experiment.overrides. A list. */}}
{{- define "headway.overrides" -}}
- cluster.fileroot=/headway/runs
- scheduler.type=kubernetes
- cluster.name_resolve.type=etcd3
- cluster.name_resolve.etcd3_addr={{ include "headway.etcdEndpoints" . }}
{{- with .Values.externalEtcd }}
{{- if .user }}
- cluster.name_resolve.etcd3_user={{ .user }}
{{- end }}
{{- if .tlsSecret }}
- cluster.name_resolve.etcd3_ca_file=/etc/headway/etcd/ca.crt
{{- end }}
{{- if .clientCertificate }}
- cluster.name_resolve.etcd3_cert_file=/etc/headway/etcd/tls.crt
- cluster.name_resolve.etcd3_key_file=/etc/headway/etcd/tls.key
{{- end }}
{{- end }}
{{- range $key, $value := .Values.experiment.overrides }}
- {{ printf "%s=%s" $key (ternary $value (toJson $value) (kindIs "string" $value)) | quote }}
{{- end }}
{{- end -}}

{{- define "headway.etcdEndpoints" -}}
{{- if .Values.externalEtcd.endpoints -}}
{{ join "," .Values.externalEtcd.endpoints }}
{{- else -}}
{{- $service := printf "%s-etcd" (include "headway.fullname" .) -}}
{{- range $member := until (int .Values.etcd.replicas) -}}
{{ if $member }},{{ end }}{{ $service }}-{{ $member }}.{{ $service }}.{{ $.Release.Namespace }}.svc:2379
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Changes when the pods of our services must be made again, beside their own template. */}}
{{- define "headway.checksum" -}}
{{ include (print .Template.BasePath "/experiment.yaml") . | sha256sum }}
{{- end -}}

{{/* Files of experiment.models, as paths below configs/. A list. */}}
{{- define "headway.modelFiles" -}}
{{- $root := . -}}
{{- range $model := .Values.experiment.models }}
{{- $files := $root.Files.Glob (printf "configs/models/%s/*" $model) }}
{{- if not $files }}{{ fail (printf "experiment.models: the chart has no configs/models/%s" $model) }}{{ end }}
{{- range $path, $_ := $files }}
- {{ $path | trimPrefix "configs/" }}
{{- end }}
{{- end }}
{{- end -}}
