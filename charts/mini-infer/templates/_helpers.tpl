{{- define "mini-infer.name" -}}
{{- contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) | trunc 50 | trimSuffix "-" }}
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

{{- define "mini-infer.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- /* What a pod of either component has beside its container. */ -}}
{{- define "mini-infer.pod" -}}
serviceAccountName: {{ include "mini-infer.name" .root }}-{{ .component }}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
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
{{- end }}

{{- /* What a container of either component has beside its arguments, ports and probes. */ -}}
{{- define "mini-infer.container" -}}
image: {{ include "mini-infer.image" (dict "root" .root "image" .values.image) | quote }}
imagePullPolicy: {{ .values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources: {{ toJson .values.resources }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
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
