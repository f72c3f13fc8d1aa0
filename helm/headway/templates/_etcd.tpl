{{/* How a member of the chart's own etcd is started: as `headway up` does (headway/launcher/plan.py), with peers. */}}
{{- define "headway.etcd" -}}
{{- $service := printf "%s-etcd" (include "headway.fullname" .) -}}
{{- $domain := printf "%s.%s.svc" $service .Release.Namespace -}}
{{- $peers := list -}}
{{- range until (int .Values.etcd.replicas) -}}
{{- $peers = append $peers (printf "%s-%d=http://%s-%d.%s:2380" $service . $service . $domain) -}}
{{- end -}}
command: [etcd]
environment:
  - {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
args:
  - --name=$(NAME)
  - --data-dir=/data/etcd
  - --listen-client-urls=http://0.0.0.0:2379
  - --advertise-client-urls=http://$(NAME).{{ $domain }}:2379
  - --listen-metrics-urls=http://0.0.0.0:2381
  - --listen-peer-urls=http://0.0.0.0:2380
  - --initial-advertise-peer-urls=http://$(NAME).{{ $domain }}:2380
  - --initial-cluster={{ join "," $peers }}
  - --initial-cluster-token={{ $service }}
  - --auto-compaction-mode=revision
  - --auto-compaction-retention=10000
  - --quota-backend-bytes=1073741824
  - --log-level=warn
{{- end -}}
