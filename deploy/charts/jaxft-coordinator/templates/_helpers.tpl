{{- define "jaxft-coordinator.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "jaxft-coordinator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "jaxft-coordinator.labels" -}}
{{ include "jaxft-coordinator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "jaxft-coordinator.scheme" -}}
{{ ternary "HTTPS" "HTTP" (ne .Values.tls.secretName "") }}
{{- end }}

{{/* What cannot work is refused here, before anything is applied. */}}
{{- define "jaxft-coordinator.check" -}}
{{- if not .Values.image.repository }}
{{- fail "image.repository is empty: build the image from deploy/images/coordinator.Dockerfile, push it, and name it here" }}
{{- end }}
{{- if not (or .Values.token.secretName .Values.tls.clientCertificates .Values.insecure) }}
{{- fail "nothing says which groups may take part: set token.secretName, or tls.clientCertificates, or insecure" }}
{{- end }}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secretName) }}
{{- fail "tls.clientCertificates needs tls.secretName, with tls.crt, tls.key and ca.crt" }}
{{- end }}
{{- if and .Values.tls.certManager.enabled (not (and .Values.tls.secretName .Values.tls.certManager.issuerRef.name)) }}
{{- fail "tls.certManager needs tls.secretName, which it writes, and tls.certManager.issuerRef.name" }}
{{- end }}
{{- if and .Values.actions (not (and .Values.token.secretName .Values.tls.secretName)) }}
{{- fail "actions need token.secretName, from which the tokens derive that allow them, and tls.secretName" }}
{{- end }}
{{- if and .Values.monitoring.serviceMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.http) }}
{{- fail "monitoring.serviceMonitor: the NetworkPolicy lets no one reach the HTTP port: name Prometheus in networkPolicy.http, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}], or set networkPolicy.enabled=false" }}
{{- end }}
{{- if and .Values.etcd.clientCertificate (not .Values.etcd.tlsSecret) }}
{{- fail "etcd.clientCertificate needs etcd.tlsSecret" }}
{{- end }}
{{- end }}

{{- define "jaxft-coordinator.flags" -}}
- "--bind=[::]:29510"
- "--http=[::]:29511"
{{- if .Values.etcd.endpoints }}
- "--etcd={{ join "," .Values.etcd.endpoints }}"
{{- if .Values.etcd.tlsSecret }}
- "--etcd-ca=/etc/jaxft/etcd/ca.crt"
{{- end }}
{{- if .Values.etcd.clientCertificate }}
- "--etcd-cert=/etc/jaxft/etcd/tls.crt"
- "--etcd-key=/etc/jaxft/etcd/tls.key"
{{- end }}
{{- else }}
- "--state=/var/lib/jaxft/state"
{{- end }}
{{- if .Values.token.secretName }}
- "--token-file=/run/jaxft/secret"
{{- end }}
{{- if .Values.tls.secretName }}
- "--tls-cert=/etc/jaxft/tls/tls.crt"
- "--tls-key=/etc/jaxft/tls/tls.key"
{{- end }}
{{- if .Values.tls.clientCertificates }}
- "--tls-client-ca=/etc/jaxft/tls/ca.crt"
{{- end }}
{{- if .Values.actions }}
- "--http-actions"
{{- end }}
{{- if .Values.insecure }}
- "--insecure"
{{- end }}
{{- range .Values.extraFlags }}
- {{ . | quote }}
{{- end }}
{{- end }}
