{{- define "mini-infer.name" -}}
{{- contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- /* Where operators that may look after the same services find each other's Lease. */}}
{{- define "mini-infer.lease-namespace" -}}
{{- .Values.operator.leaderElectionNamespace | default (empty .Values.namespace | ternary "kube-system" .Release.Namespace) }}
{{- end }}

{{- define "mini-infer.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "mini-infer.labels" -}}
{{ include "mini-infer.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- /* By digest where one is given: what runs is then what was built, whatever becomes of the tag. */ -}}
{{- define "mini-infer.image" -}}
{{- $tag := .image.tag | default (empty .image.digest | ternary .root.Chart.AppVersion "") }}
{{- .image.repository }}{{ with $tag }}:{{ . }}{{ end }}{{ with .image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- /* Whether objects of the Prometheus operator are made: "true", or "" for no. */ -}}
{{- define "mini-infer.monitors" -}}
{{- $wanted := .Values.monitoring.monitors | toString }}
{{- if eq $wanted "true" }}true{{ else if and (eq $wanted "auto") (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") }}true{{ end }}
{{- end }}

{{- /* One flag for each option that is set: maxAttempts: 5 is --max-attempts=5, true is the flag alone, null leaves it out. */ -}}
{{- define "mini-infer.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- --{{ kebabcase $name }}
{{- end }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" (kebabcase $name) $value | quote }}
{{- else if not (kindIs "invalid" $value) }}
- --{{ kebabcase $name }}={{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Metadata of the pods of either component. `port` names the container port that /metrics is on. */ -}}
{{- define "mini-infer.pod-metadata" -}}
labels:
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "mini-infer.selector" . | nindent 2 }}
{{- $scrape := dict }}
{{- if and .root.Values.monitoring.annotations (not (include "mini-infer.monitors" .root)) }}
{{- $scrape = dict "prometheus.io/scrape" "true" "prometheus.io/port" (.metricsPort | toString) "prometheus.io/path" "/metrics" }}
{{- end }}
{{- with merge (dict) .values.podAnnotations $scrape }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* What a pod of either component has beside its container. */ -}}
{{- define "mini-infer.pod" -}}
serviceAccountName: {{ include "mini-infer.name" .root }}-{{ .component }}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .values.affinity }}
affinity: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
volumes:
  - name: tmp
    emptyDir: {}
  {{- with .volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* What a container of either component has beside its arguments, ports and probes. */ -}}
{{- define "mini-infer.container" -}}
image: {{ include "mini-infer.image" (dict "root" .root "image" .values.image) | quote }}
imagePullPolicy: {{ .values.image.pullPolicy }}
{{- with concat (.env | default list) (.values.extraEnv | default list) }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.extraEnvFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources: {{ toJson .values.resources }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- with .mounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* A service account with the rules given: a ClusterRole, or a Role in the one namespace that is looked after. */ -}}
{{- define "mini-infer.rights" -}}
{{- $name := printf "%s-%s" (include "mini-infer.name" .root) .component }}
{{- $scope := empty .root.Values.namespace | ternary "Cluster" "" }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "mini-infer.labels" . | nindent 4 }}
  {{- with .values.serviceAccountAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $scope }}Role
metadata:
  name: {{ $name }}
  {{- with .root.Values.namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "mini-infer.labels" . | nindent 4 }}
rules: {{- toYaml .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $scope }}RoleBinding
metadata:
  name: {{ $name }}
  {{- with .root.Values.namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "mini-infer.labels" . | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ $scope }}Role, name: {{ $name }}}
subjects: [{kind: ServiceAccount, name: {{ $name }}, namespace: {{ .root.Release.Namespace }}}]
{{- end }}
