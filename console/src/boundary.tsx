import { Component, type ComponentChildren } from "preact";

/** Shows an error in place of a page that cannot be shown, so that the other pages stay. */
export class Boundary extends Component<{ children: ComponentChildren; onReset?: () => void }, { problem: string }> {
  override state = { problem: "" };

  override componentDidCatch(error: unknown) {
    console.error(error);
    this.setState({ problem: error instanceof Error ? error.message : String(error) });
  }

  render() {
    if (!this.state.problem) return this.props.children;
    return (
      <section class="card">
        <h1>This page cannot be shown</h1>
        <p class="error" role="alert">
          {this.state.problem}
        </p>
        <button
          type="button"
          onClick={() => {
            this.props.onReset?.();
            this.setState({ problem: "" });
          }}
        >
          {this.props.onReset ? "Forget the chats and begin anew" : "Try again"}
        </button>
      </section>
    );
  }
}
