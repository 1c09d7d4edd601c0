{{- define "jaxft-job.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "jaxft-job.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "jaxft-job.labels" -}}
{{ include "jaxft-job.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The labels and annotations of what starts a group. */}}
{{- define "jaxft-job.queued" -}}
labels:
  {{- include "jaxft-job.labels" . | nindent 2 }}
  {{- with .Values.queue }}
  kueue.x-k8s.io/queue-name: {{ . }}
  {{- end }}
  {{- with .Values.jobLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.jobAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What cannot work is refused here, before anything is applied. */}}
{{- define "jaxft-job.check" -}}
{{- if not .Values.image }}{{ fail "image is empty: name the image with your program" }}{{ end }}
{{- if not .Values.command }}{{ fail "command is empty: name your program, such as [python, train.py]" }}{{ end }}
{{- if not .Values.coordinator }}
{{- fail "coordinator is empty: the notes of the chart jaxft-coordinator print its addresses" }}
{{- end }}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) }}
{{- fail "JobSet makes names of hosts of the release's name: it must begin with a letter, and have no dots" }}
{{- end }}
{{- if and (gt (int .Values.hosts) 1) (gt (int .Values.processes) 1) }}
{{- fail "processes is for groups of one pod: with hosts, each pod is one process" }}
{{- end }}
{{- if and .Values.firstGroup (eq .Values.form "restartJob") }}
{{- fail "firstGroup is not for form: restartJob: there JobSet numbers the groups, from 0" }}
{{- end }}
{{- range $name := list "containers" "volumes" }}
{{- if hasKey $.Values.podSpec $name }}{{ fail (printf "podSpec.%s would replace the chart's own" $name) }}{{ end }}
{{- end }}
{{- if and (gt (int .Values.hosts) 1) .Values.check }}
{{- fail "check is for groups of one pod: with hosts, no launcher runs in the pods that could run it" }}
{{- end }}
{{- if and .Values.tls.clientCertificate (not .Values.tls.secretName) }}
{{- fail "tls.clientCertificate needs tls.secretName, with ca.crt, tls.crt and tls.key" }}
{{- end }}
{{- end }}

{{/* The program of a group: a dict of root, and index, its number, as text. */}}
{{- define "jaxft-job.command" -}}
{{- $values := .root.Values }}
{{- if gt (int $values.hosts) 1 }}
# A drained program ends with 0, which completes its Job. If SIGTERM drained it, its
# group has to start on another node, so the pod ends with 75, as with `jaxft launch`.
command:
  - sh
  - -c
  - |
    drained=0
    trap 'drained=75; kill -TERM $program 2>/dev/null' TERM
    "$@" &
    program=$!
    [ $drained = 0 ] || kill -TERM $program
    while wait $program; status=$?; kill -0 $program 2>/dev/null; do :; done
    [ $status != 0 ] || status=$drained
    exit $status
  - sh
args: {{- toYaml $values.command | nindent 2 }}
{{- else }}
command: [jaxft, launch]
args:
  - "--group={{ .index }}"
  - "--nproc={{ $values.processes }}"
  - "--folder={{ $values.folder }}/group-{{ .index }}"
  - "--drain-timeout-s={{ max 1 (sub (int $values.gracePeriodSeconds) 15) }}"
  {{- with $values.check }}
  - {{ printf "--check=%s" . | quote }}
  {{- end }}
  - "--"
  {{- toYaml $values.command | nindent 2 }}
{{- end }}
{{- end }}

{{/* The environment of a group: a dict of root, index and spare. */}}
{{- define "jaxft-job.environment" -}}
{{- $values := .root.Values }}
{{- if gt (int $values.hosts) 1 }}
- {name: JAXFT_GROUP, value: "group-{{ .index }}"}
# What `jaxft launch` sets in other pods.
- {name: PYTHONHASHSEED, value: "0"}
- {name: JAX_COMPILATION_CACHE_DIR, value: "{{ $values.folder }}/group-{{ .index }}/compiled"}
- {name: JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS, value: "0"}
- {name: JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES, value: "-1"}
{{- end }}
- {name: JAXFT_COORDINATOR, value: {{ $values.coordinator | quote }}}
{{- if .spare }}
- {name: JAXFT_SPARE, value: "1"}
{{- end }}
{{- with $values.tokenSecret }}
- {name: JAXFT_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
{{- end }}
{{- if $values.tls.secretName }}
- {name: JAXFT_TLS_CA, value: /etc/jaxft/tls/ca.crt}
{{- if $values.tls.clientCertificate }}
- {name: JAXFT_TLS_CERT, value: /etc/jaxft/tls/tls.crt}
- {name: JAXFT_TLS_KEY, value: /etc/jaxft/tls/tls.key}
{{- end }}
{{- end }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The Job of a group: a dict of root, container, index, spare and own (whether the pods get their command here). */}}
{{- define "jaxft-job.job" -}}
{{- $values := .root.Values }}
metadata:
  labels: {{- include "jaxft-job.selector" .root | nindent 4 }}
    {{- if eq .container "node" }}
    trainer.kubeflow.org/trainjob-ancestor-step: trainer
    {{- end }}
spec:
  parallelism: {{ $values.hosts }}
  completions: {{ $values.hosts }}
  completionMode: Indexed
  # A group fails as a whole.
  backoffLimit: 0
  podFailurePolicy:
    rules:
      # The job refused the program: another start would not help.
      - action: FailJob
        onExitCodes: {containerName: {{ .container }}, operator: In, values: [78]}
      - action: FailJob
        onPodConditions: [{type: DisruptionTarget, status: "True"}]
  template:
    metadata:
      labels: {{- merge (dict) $values.podLabels (include "jaxft-job.selector" .root | fromYaml) | toYaml | nindent 8 }}
      {{- with $values.podAnnotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec: {{- mergeOverwrite (include "jaxft-job.pod" . | fromYaml) $values.podSpec | toYaml | nindent 6 }}
{{- end }}

{{/* The spec of a group's pods, before `podSpec`. */}}
{{- define "jaxft-job.pod" -}}
{{- $values := .root.Values }}
restartPolicy: Never
terminationGracePeriodSeconds: {{ $values.gracePeriodSeconds }}
enableServiceLinks: false
{{- if gt (int $values.hosts) 1 }}
serviceAccountName: {{ include "jaxft-job.name" .root }}
{{- else }}
automountServiceAccountToken: false
{{- end }}
containers:
  - name: {{ .container }}
    image: {{ $values.image }}
    imagePullPolicy: {{ $values.imagePullPolicy }}
    {{- if .own }}
    {{- include "jaxft-job.command" . | trim | nindent 4 }}
    env:
      {{- if eq .index "$(JAXFT_GROUP_INDEX)" }}
      - name: JAXFT_GROUP_INDEX
        valueFrom: {fieldRef: {fieldPath: "metadata.annotations['jobset.sigs.k8s.io/job-global-index']"}}
      {{- end }}
      {{- include "jaxft-job.environment" . | trim | nindent 6 }}
    {{- end }}
    resources: {{- toYaml $values.resources | nindent 6 }}
    {{- with $values.securityContext }}
    securityContext: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if or $values.sharedMemory $values.tls.secretName $values.volumeMounts }}
    volumeMounts:
      {{- if $values.sharedMemory }}
      - {name: shared-memory, mountPath: /dev/shm}
      {{- end }}
      {{- if $values.tls.secretName }}
      - {name: jaxft-tls, mountPath: /etc/jaxft/tls, readOnly: true}
      {{- end }}
      {{- with $values.volumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- end }}
{{- if or $values.sharedMemory $values.tls.secretName $values.volumes }}
volumes:
  {{- with $values.sharedMemory }}
  - name: shared-memory
    emptyDir: {medium: Memory, sizeLimit: {{ . }}}
  {{- end }}
  {{- if $values.tls.secretName }}
  - name: jaxft-tls
    secret:
      secretName: {{ $values.tls.secretName }}
      items:
        - {key: ca.crt, path: ca.crt}
        {{- if $values.tls.clientCertificate }}
        - {key: tls.crt, path: tls.crt}
        - {key: tls.key, path: tls.key}
        {{- end }}
  {{- end }}
  {{- with $values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* When a group is restarted: a dict of root and what, JobSet or Job. */}}
{{- define "jaxft-job.failurePolicy" -}}
maxRestarts: {{ .root.Values.maxRestarts }}
rules:
  - name: refused
    action: FailJobSet
    onJobFailureReasons: [PodFailurePolicy]
    onJobFailureMessagePatterns: ["exit code 78 "]
  - name: disrupted
    action: Restart{{ .what }}AndIgnoreMaxRestarts
    onJobFailureReasons: [PodFailurePolicy]
  - name: failed
    action: Restart{{ .what }}
{{- end }}
