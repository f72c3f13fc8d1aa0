{{/*
What runs, as a table: for each component its block in values.yaml, its kind, its ports, the kind of its Service, and which
folders of which volumes it sees. All other templates read it.

  weights      written by the trainer, read by the others          journal       rollout-controller only
  checkpoints  trainer only                                        models,cache  whoever loads models or their tokenizers
*/}}
{{- define "headway.components" -}}
name-resolve:
  values: nameResolve
  kind: Deployment
  ports: {grpc: 7000, http: 8470}
reward:
  values: reward
  kind: Deployment
  ports: {grpc: 7000, http: 8470}
  volumes: [cache]
rollout-controller:
  values: rolloutController
  kind: StatefulSet
  ports: {grpc: 7000, http: 8470}
  volumes: [models, cache, runs, weights, journal]
  weightsReadOnly: true
  folders: {journal: [journal, rollout, eval-rollout, traces, logs]}
inference:
  values: inference
  kind: Deployment
  ports: {grpc: 7000, http: 8000, metrics: 8470}
  volumes: [models, cache, runs, weights]
  weightsReadOnly: true
trainer:
  values: trainer
  kind: StatefulSet
  headless: true
  ports: {grpc: 7000, http: 8470, rendezvous: {{ .Values.torchrun.port }}}
  volumes: [models, cache, runs, weights, checkpoints]
  folders: {checkpoints: [recover, checkpoints, logs, traces]}
{{- if not .Values.externalEtcd.endpoints }}
etcd:
  values: etcd
  kind: StatefulSet
  headless: true
  ports: {client: 2379, peer: 2380, metrics: 2381}
{{- end }}
{{- end -}}

{{/*
Who speaks to whom; whatever is not here is denied. `port: any`: collectives choose their ports as they go.
`etcd` and `outside` are added by networkpolicies.yaml.
*/}}
{{- define "headway.flows" -}}
- {from: name-resolve, to: etcd, port: client}
- {from: etcd, to: etcd, port: peer}
- {from: reward, to: name-resolve, port: grpc}
- {from: rollout-controller, to: name-resolve, port: grpc}
- {from: inference, to: name-resolve, port: grpc}
- {from: trainer, to: name-resolve, port: grpc}
- {from: trainer, to: rollout-controller, port: grpc}
- {from: rollout-controller, to: trainer, port: grpc}
- {from: rollout-controller, to: reward, port: grpc}
- {from: rollout-controller, to: inference, port: http}
- {from: test, to: rollout-controller, port: http}
{{- if gt (mul (int .Values.trainer.replicas) (int .Values.torchrun.processesPerNode)) 1 }}
- {from: trainer, to: trainer, port: any}
{{- end }}
{{- if .Values.networkPolicy.broadcast }}
- {from: trainer, to: inference, port: any}
- {from: inference, to: trainer, port: any}
{{- end }}
{{- end -}}
