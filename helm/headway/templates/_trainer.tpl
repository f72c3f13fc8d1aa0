{{/*
How the trainer is started: one process, or torchrun on each node of the set.

The nodes meet at the first one, in a rendezvous that bears the checksum of what they run: nodes of two experiments or images never
train together. When a node is lost its successor asks to come in, and torchrun makes all of them start again from the newest
checkpoint. A changed image or experiment replaces the set as a whole, under another name, for a node at a time would wait for
the others for ever. A run that is over stays until it is asked to stop, so that it is not started again and again.
*/}}
{{- define "headway.trainer" -}}
{{- $nodes := int .Values.trainer.replicas -}}
{{- $processes := int .Values.torchrun.processesPerNode -}}
{{- $image := include "headway.image" (dict "root" . "image" .Values.trainer.image) -}}
{{- $generation := printf "%s %s %s %v" (include "headway.checksum" .) (include "headway.overrides" .) $image .Values.trainer.args | sha256sum | trunc 8 -}}
{{- $set := gt $nodes 1 | ternary (printf "trainer-%s" $generation) "trainer" -}}
{{- $service := printf "%s-trainer" (include "headway.fullname" .) -}}
workload: {{ $set }}
environment:
  - {name: HEADWAY_WHEN_DONE, value: stay}
{{- if gt (mul $nodes $processes) 1 }}
  # Else the first node keeps the address of its last meeting, and a node that comes back waits for another one in vain.
  - {name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE, value: "1"}
command:
  - dumb-init
  - --single-child
  - --
  - sh
  - -c
  - >-
    [ "${HOSTNAME##*-}" = 0 ] && first=true || first=false;
    exec python -m torch.distributed.run --nnodes={{ $nodes }} --nproc-per-node={{ $processes }} --max-restarts=0
    --local-addr="$HOSTNAME.{{ $service }}.{{ .Release.Namespace }}.svc"
    --rdzv-backend=c10d --rdzv-id={{ $generation }}
    --rdzv-endpoint={{ include "headway.fullname" . }}-{{ $set }}-0.{{ $service }}.{{ .Release.Namespace }}.svc:{{ .Values.torchrun.port }}
    --rdzv-conf="is_host=$first,join_timeout={{ .Values.torchrun.joinTimeoutSeconds }}"
    -m services.trainer "$@"
  - torchrun
{{- end }}
{{- end -}}
